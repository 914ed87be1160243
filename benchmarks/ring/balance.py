"""Packed documents of very uneven lengths under zigzag, under a plan for them, and under one for documents that are not known.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.ring.balance [--platforms triton cute] [--strategies ring all_gather]

Forward and backward, bfloat16, 32 query and 8 K/V heads of 128, causal within documents of lognormal lengths. Prints for each draw
the imbalance of every layout, its time on the slowest rank, and how far its results are from those of zigzag.
On a machine without GPUs: torchrun ... -m benchmarks.ring.balance --tokens 1024 --heads 2 1 --dim 16 --platforms xla --samples 1
"""

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

import ring_attn
from benchmarks.harness.systems import difference
from benchmarks.harness.team import ON_GPU, Team
from benchmarks.harness.timing import Timed, sample
from ring_attn import Ring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, and of keys and values")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--platforms", nargs="*", default=["triton", "cute"])
    parser.add_argument("--strategies", nargs="*", default=["ring", "all_gather"])
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    team = Team()
    for seed in range(options.draws):
        lengths = drawn(seed, options.tokens)
        team.say(
            f"\ndraw {seed}: {len(lengths)} documents, the longest {max(lengths)} of {options.tokens} tokens, {team.size} ranks"
        )
        for platform in options.platforms:
            for strategy in options.strategies:
                try:
                    compare(team, options, lengths, platform, strategy)
                except Exception as error:  # the others are still worth their time
                    team.say(f"{platform:8} {strategy:12} {type(error).__name__}: {str(error)[:200]}")
    team.close()


def drawn(seed: int, total: int) -> list[int]:
    rng, lengths, left = np.random.default_rng(seed), list[int](), total
    while left:
        lengths.append(min(left, max(1, int(rng.lognormal(6.5, 1.5)))))
        left -= lengths[-1]
    return lengths


def compare(team: Team, options: argparse.Namespace, lengths: list[int], platform: str, strategy: str) -> None:
    plan = partial(ring_attn.balance, options.tokens, team.size, causal=True)
    layouts: dict[str, Any] = {
        "zigzag": "zigzag",
        "plan": plan(documents=lengths),
        "plan, sum": plan(documents=lengths, steps=False),
        "not known": plan(documents="unknown"),
    }
    steps, wanted = {}, None
    for name, layout in layouts.items():
        steps[name] = step = make_step(team, options, lengths, Ring(layout=layout), dict(platform=platform, strategy=strategy))
        found = [Ring(layout=layout).unshard(x) for x in step()]
        wanted = found if wanted is None else wanted
        errors = " ".join(f"{difference([got], [want]):.1e}" for got, want in zip(found, wanted, strict=True))
        team.say(f"{platform:8} {strategy:12} {name:10} out, dq, dk, dv beside zigzag's: {errors}  {layout}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.samples):
        for name, step in steps.items():
            team.ready()
            times[name].append(team.slowest(sample(Timed(step), 3)))
    base = statistics.median(times["zigzag"])
    for name, taken in times.items():
        median = statistics.median(taken)
        team.say(f"{platform:8} {strategy:12} {name:10} {median:8.2f} ms, {base / median:.2f} times as fast as zigzag")


def make_step(team: Team, options: argparse.Namespace, lengths: list[int], ring: Ring, settings: dict[str, Any]) -> Any:
    """Forward and backward on this rank's shards; returns out, dq, dk and dv."""
    generator = torch.Generator(team.device).manual_seed(0)  # the same on every rank
    heads = (options.heads[0], options.heads[1], options.heads[1], options.heads[0])
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def normal(number: int) -> torch.Tensor:
        whole = torch.randn(1, options.tokens, number, options.dim, generator=generator, device=team.device)
        return ring.shard(whole).to(dtype)

    q, k, v, dout = map(normal, heads)
    ids = ring.shard(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]).to(team.device, torch.int32)
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> list[torch.Tensor]:
        out = ring.attention(q, k, v, causal=True, q_segment_ids=ids, **settings)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    return step


if __name__ == "__main__":
    main()
