"""Checks the bridge on GPUs. Run it on a machine that has some; it prints its findings for benchmarks/results/.

    python benchmarks/gpu_check.py [--held 0.9]

One GPU: zero copy both ways; the error of output and gradients against float64, compared with that of torch SDPA in the same dtype;
JAX's memory next to torch's. Two states of the GPU are tested. Held: live torch tensors fill 90 % of its memory. Cached: the
tensors are gone, but torch's allocator keeps the memory, and the attention needs more than is left; the call then empties torch's
cache and continues.
Several GPUs: every feature on rings of them, in float64 (the xla kernel) and float32 (Triton's), against the whole sequence in
float64 (tests/support/workers/attention_worker.py), and every strategy, over two mesh dimensions too (strategies_worker.py).
Without a GPU the errors are still compared, and the calls that would fill a GPU run at a small size.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import ring_attn
from benchmarks.cpu.compare import sdpa
from benchmarks.harness.team import ON_GPU, hardware, software
from torch_bridge.dlpack import to_jax, to_torch
from torch_bridge.runtime import start

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if ON_GPU else "cpu"
GIB = 2**30

ours = partial(ring_attn.ring_attention, mesh="local", causal=True)


def zero_copy() -> None:
    tensor = torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array).data_ptr() == tensor.data_ptr()
    print("zero copy, torch to JAX and back: same pointer")


def results(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def errors(dtype: torch.dtype) -> None:
    *inputs, dout = (torch.randn(2, 1000, 4, 64, device=DEVICE).to(dtype) for _ in range(4))
    exact = results(sdpa, [x.double() for x in inputs], dout.double())

    def error(attention: Callable[..., torch.Tensor]) -> list[float]:
        return [float((got - want).abs().max()) for got, want in zip(results(attention, inputs, dout), exact, strict=True)]

    mine, theirs = error(ours), error(sdpa)
    print(f"{dtype}, largest error of out, dq, dk, dv: ring_attn {mine}, torch SDPA {theirs}")
    assert all(a <= 2 * b + 1e-6 for a, b in zip(mine, theirs, strict=True))


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
    if ON_GPU:
        torch.cuda.empty_cache()  # for the rings, which are other processes


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


def rings(processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    worker = ROOT / "tests" / "support" / "workers" / "attention_worker.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4"}
    for dtype, count in (("float64", 1), ("float32", 1), ("float32", processes // 2)):
        print(f"{count} x a ring of {processes // count}, every feature, {dtype}, forward and all gradients:", flush=True)
        subprocess.run([*command, str(worker), "cuda", str(count), dtype], check=True, env=environment, stderr=subprocess.STDOUT)


def strategies(processes: int) -> None:
    """Every strategy from torch, over one dimension and over two, against the oracle."""
    support = ROOT / "tests" / "support"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    shape, both = (f"2x{processes // 2}", "ab") if processes > 2 else ("2", "a")
    alone = [f"{name}:{case}:zigzag:{both}" for name in ("all_gather", "ulysses") for case in ("documents", "window")]
    together = [f"{name}:{case}:zigzag:ab" for name in ("ulysses_ring", "ring_ulysses") for case in ("documents", "window")]
    with tempfile.TemporaryDirectory() as folder:
        cases = f"{folder}/cases.pt"
        on_cpu = {**environment, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, str(support / "strategy_cases.py"), cases], check=True, env=on_cpu)
        for dtype in ("float64", "float32"):
            print(f"strategies over {shape} GPUs, {dtype}, forward and all gradients:", flush=True)
            runs = [*alone, *(together if processes > 2 else [])]
            worker = str(support / "workers" / "strategies_worker.py")
            subprocess.run([*command, worker, cases, "cuda", dtype, shape, *runs], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=float, default=0.9, help="the part of the card that torch holds")
    held = parser.parse_args().held
    print(f"{max(1, torch.cuda.device_count())} x {hardware()}; {software()}")
    start()
    zero_copy()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        errors(dtype)
    beside_torch(held)
    if torch.cuda.device_count() > 1:
        rings(torch.cuda.device_count())
        strategies(torch.cuda.device_count())
    print("all right")


if __name__ == "__main__":
    main()
