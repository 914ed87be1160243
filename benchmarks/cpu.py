"""Attention of one process on a CPU: ring_attn (XLA kernel) beside torch SDPA, in one run. Seconds, least of several.

python benchmarks/cpu.py [--blocks 64 128 256 512]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable

import jax
import torch
import torch.nn.functional as F

import ring_attn
from jax_core import BwdParams, FwdParams, RingAttentionConfig

SHAPES = tuple((1, 2**power, 8, 64) for power in range(10, 15))  # batch, length, heads, dim


def best(function: Callable[[], object], runs: int = 3) -> float:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(name: str, attention: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v)

    def both() -> None:
        attention(q, k, v).sum().backward()

    print(f"{name:14} {best(forward):8.3f} {best(both):8.3f}", flush=True)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def ring(block: int | None):
    cfg = None if block is None else RingAttentionConfig(FwdParams(block, block), BwdParams(block, block))
    return lambda q, k, v: ring_attn.ring_attention(q, k, v, causal=True, cfg=cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="*", default=[])
    blocks = parser.parse_args().blocks
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, jax {jax.__version__}, float32, causal")
    for shape in SHAPES:
        print(f"\nbatch, length, heads, dim = {shape}\n{'':14} {'fwd':>8} {'fwd+bwd':>8}")
        measure("torch SDPA", sdpa, shape)
        measure("ring_attn", ring(None), shape)
        for block in blocks:
            measure(f"  block {block}", ring(block), shape)


if __name__ == "__main__":
    main()
