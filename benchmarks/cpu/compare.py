"""Attention of one process on a CPU: ring_attn (XLA kernel) compared with torch SDPA in one run. Medians.

python -m benchmarks.cpu.compare [--blocks 64 128 256 512] [--lengths 1024 2048 4096 8192 16384]
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Compare, Measurement, Timer

import ring_attn
from benchmarks.harness.team import hardware, software
from jax_core import BwdParams, FwdParams, RingAttentionConfig

HEADS, DIM = 8, 64

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def systems(blocks: list[int]) -> dict[str, Attention]:
    ours: Attention = partial(ring_attn.ring_attention, causal=True)
    tried = {block: RingAttentionConfig(FwdParams(block, block), BwdParams(block, block)) for block in blocks}
    named: dict[str, Attention] = {"torch SDPA": sdpa, "ring_attn": ours}
    return named | {f"block {block}": partial(ring_attn.ring_attention, causal=True, cfg=cfg) for block, cfg in tried.items()}


def measure(name: str, attention: Attention, length: int) -> list[Measurement]:
    inputs = [torch.randn(1, length, HEADS, DIM, requires_grad=True) for _ in range(3)]

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def both() -> None:
        attention(*inputs).sum().backward()

    phases = {"forward": forward, "forward and backward": both}
    where: dict[str, Any] = dict(num_threads=torch.get_num_threads(), label=f"{length} tokens", sub_label=name)
    timers = [Timer("run()", globals={"run": run}, description=phase, **where) for phase, run in phases.items()]
    return [timer.blocked_autorange(min_run_time=1.0) for timer in timers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="*", default=[], help="block sizes to try beside the kernel's own")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2**power for power in range(10, 15)])
    options = parser.parse_args()
    print(f"{hardware()}; {software()}; float32, causal, batch 1, {HEADS} heads of {DIM}")
    for length in options.lengths:
        measured = [measure(name, attention, length) for name, attention in systems(options.blocks).items()]
        Compare([measurement for pair in measured for measurement in pair]).print()


if __name__ == "__main__":
    main()
