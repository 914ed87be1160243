"""JAX's memory beside torch's, on a GPU that torch fills. In a process of its own; it prints who holds how much.

    python tests/gpu/full_memory_worker.py [--held 0.9]

Two states are tried. Held: live tensors of torch fill 90 % of the GPU's memory. Cached: the tensors are gone, but torch's allocator
keeps the memory, and the attention needs more than is left; the call then empties torch's cache and continues.
Without a GPU the calls run at a small size.
"""

import argparse
from functools import partial

import torch

import ring_attn
from benchmarks.harness.team import GIB, ON_GPU, hardware, software

DEVICE = "cuda" if ON_GPU else "cpu"

ours = partial(ring_attn.ring_attention, mesh="local", causal=True)


def beside_torch(held: float) -> None:
    tokens = 16384 if ON_GPU else 64
    memory("at the start")
    tensors = fill(held)
    memory("held by torch")
    attend(tokens)
    memory(f"after {tokens} tokens")
    if ON_GPU:
        tensors += gibibytes(torch.cuda.mem_get_info()[0] / GIB - 1)
    del tensors
    memory("let go, but in torch's cache")
    attend(8 * tokens)  # the three gradients alone take 1.5 GiB, and about 1 GiB is free
    memory(f"after {8 * tokens} tokens")


def fill(held: float) -> list[torch.Tensor]:
    """Tensors that fill the share ``held`` of the GPU's memory, as a model's parameters and activations would."""
    return gibibytes((torch.cuda.mem_get_info()[1] * held - torch.cuda.memory_reserved()) / GIB) if ON_GPU else []


def gibibytes(count: float) -> list[torch.Tensor]:
    return [torch.ones(GIB // 2, dtype=torch.uint8, device=DEVICE) for _ in range(int(2 * count))]


def attend(tokens: int) -> None:
    shape, dtype = ((1, tokens, 16, 128), torch.bfloat16) if ON_GPU else ((1, tokens, 2, 8), torch.float32)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    ours(q, k, v).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def memory(what: str) -> None:
    if not ON_GPU:
        print(what)
        return
    import jax

    pool = jax.local_devices()[0].memory_stats() or {}
    free, total = torch.cuda.mem_get_info()
    sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pool.get("pool_bytes", 0), pool.get("bytes_in_use", 0)
    told = "torch holds {:.2f}, keeps {:.2f}; JAX's pool {:.2f} (in use {:.2f}); free {:.2f} of {:.2f} GiB"
    print(f"{what:34} {told.format(*(size / GIB for size in (*sizes, free, total)))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=float, default=0.9, help="the part of the card that torch holds")
    held = parser.parse_args().held
    print(f"{hardware()}; {software()}")
    ring_attn.start()
    beside_torch(held)
    print("all right")


if __name__ == "__main__":
    main()
