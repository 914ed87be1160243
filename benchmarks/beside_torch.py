"""JAX's memory beside torch's on one GPU: a model of torch that holds 90 % of the card, and ring_attention still runs.

    python benchmarks/beside_torch.py [--held 0.9]

Two states of the card are tried. Held: live tensors of torch fill it. Cached: the tensors are gone, but torch's allocator keeps the
memory, and the attention needs more than the card has left; the call then empties torch's cache and goes on.
On a CPU nothing is filled, and the calls run at a small size.
"""

import argparse
import os

import torch

import ring_attn
from report import versions
from torch_bridge.runtime import start

ON_GPU = torch.cuda.is_available()
GIB = 2**30


def memory(what: str) -> None:
    if not ON_GPU:
        print(what)
        return
    import jax

    free, total = torch.cuda.mem_get_info()
    pool = jax.local_devices()[0].memory_stats()
    kept = "JAX's pool {:.2f} (in use {:.2f})".format(*(pool.get(name, 0) / GIB for name in ("pool_bytes", "bytes_in_use")))
    held, cached = torch.cuda.memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB
    left = f"free {free / GIB:.2f} of {total / GIB:.2f} GiB"
    print(f"{what:34} torch holds {held:.2f}, keeps {cached:.2f}; {kept}; {left}", flush=True)


def fill(size: int) -> list[torch.Tensor]:
    """Tensors of as many bytes, as the parameters and activations of a model are."""
    return [torch.ones(GIB // 2, dtype=torch.uint8, device="cuda") for _ in range(size // (GIB // 2))] if ON_GPU else []


def room(held: float) -> tuple[int, int]:
    """Bytes that torch has yet to take until ``held`` of the card is its own, and those that are free."""
    if not ON_GPU:
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return int(total * held) - torch.cuda.memory_reserved(), free


def attend(tokens: int, heads: int, dim: int) -> None:
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    shape = 1, tokens, heads, dim
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    out = ring_attn.ring_attention(q, k, v, causal=True, mesh="local")
    out.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=float, default=0.9)
    held = parser.parse_args().held
    print(", ".join(map(" ".join, versions().items())))
    start()  # nothing is taken ahead: XLA_PYTHON_CLIENT_PREALLOCATE is false unless the user has set it
    shape = (16384, 16, 128) if ON_GPU else (64, 2, 8)
    memory("at the start")
    tensors = fill(room(held)[0])
    memory("held by torch")
    attend(*shape)
    memory(f"after {shape[0]} tokens")
    tensors += fill(room(held)[1] - GIB)
    del tensors
    memory("let go, but in torch's cache")
    large = (shape[0] * 8, *shape[1:])  # the three gradients alone have 1.5 GiB, and about 1 is free
    attend(*large)
    memory(f"after {large[0]} tokens")
    setting = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    print(f"all right (XLA_PYTHON_CLIENT_PREALLOCATE={setting})")


if __name__ == "__main__":
    main()
