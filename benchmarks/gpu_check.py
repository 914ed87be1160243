"""Does the bridge hold on GPUs? Run on a machine that has some; prints what it found, for benchmarks/results/.

    python benchmarks/gpu_check.py

One GPU: zero copy both ways, and the error of output and gradients against float64 beside that of torch SDPA in the same dtype.
Several: every feature on rings of them, in float64 (the xla kernel) and float32 (Triton's), against the whole sequence in float64
(tests/support/workers/attention_worker.py).
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import ring_attn

ROOT = Path(__file__).parent.parent


def versions() -> None:
    import jax

    names = f"python {platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}"
    print(f"{names}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")


def zero_copy() -> None:
    from torch_bridge.dlpack import to_jax, to_torch

    tensor = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array).data_ptr() == tensor.data_ptr()
    print("zero copy, torch to jax and back: same pointer")


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def results(attention, inputs, dout) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def errors(dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, 1000, 4, 64, device="cuda").to(dtype) for _ in range(3)]
    dout = torch.randn(2, 1000, 4, 64, device="cuda").to(dtype)
    exact = results(sdpa, [x.double() for x in inputs], dout.double())

    def error(attention) -> list[float]:
        return [float((got - want).abs().max()) for got, want in zip(results(attention, inputs, dout), exact, strict=True)]

    ours, theirs = error(lambda *x: ring_attn.ring_attention(*x, mesh="local", causal=True)), error(sdpa)
    print(f"{dtype}, largest error of out, dq, dk, dv: ring_attn {ours}, torch SDPA {theirs}")
    assert all(a <= 2 * b + 1e-6 for a, b in zip(ours, theirs, strict=True))


def ring(processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    worker = ROOT / "tests" / "workers" / "attention_worker.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4"}
    for dtype, rings in (("float64", 1), ("float32", 1), ("float32", processes // 2)):
        print(f"{rings} x a ring of {processes // rings}, every feature, {dtype}, forward and all gradients:", flush=True)
        subprocess.run([*command, str(worker), "cuda", str(rings), dtype], check=True, env=environment, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    versions()
    zero_copy()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        errors(dtype)
    if torch.cuda.device_count() > 1:
        ring(torch.cuda.device_count())
    print("all right")
