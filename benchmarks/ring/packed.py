"""Packed documents over a ring: this library's zigzag ring and its placement, beside ring-flash-attention's two functions for them.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ring.packed [--systems placed zigzag ...] [--output FOLDER]

Causal within documents, bfloat16, 16 heads of 128, called from torch, 64k tokens in all. The systems take turns; every sample
begins at a barrier; a time is the median of the slowest rank's. TFLOP/s are per GPU, of the visible pairs: 2 B H D sum(length^2),
forward and backward together 3.5 times that. Every system has the same whole inputs, and its results are compared with the first
one's in the order of the tokens.

placed          shard_packed: short documents whole on a rank, long ones cut; kernels are told the pieces
placed, ids     the same placement, told by ids
zigzag          shard_batch: the whole sequence in zigzag
zigzag varlen   ring-flash-attention, each document in zigzag over all ranks (torch's FlashAttention-2 kernels)
llama3          ring-flash-attention, contiguous shards, keys gathered a group of heads at a time (the same kernels)

On a machine without GPUs: torchrun ... -m benchmarks.ring.packed --tokens 1024 --heads 2 --dim 16 --systems placed zigzag
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ring_attn
from benchmarks.harness.checked import checked
from benchmarks.harness.report import Report, default_folder
from benchmarks.harness.streams import Event, recorded, split
from benchmarks.harness.systems import Case, Inputs, Prepared, make_inputs, through_torch
from benchmarks.harness.team import GIB, ON_GPU, Team
from benchmarks.harness.timing import reason, take_turns
from benchmarks.ring.flash_attn_of_torch import ring_flash_attn
from benchmarks.ring.profile import KINDS, kind

Take = Callable[[torch.Tensor], torch.Tensor]  # [1, length, heads, dim] of the whole: this rank's part
PHASES = ("forward", "both")


def cases(options: argparse.Namespace, size: int) -> list[Case]:
    """Documents of lengths that every system can cut: multiples of two chunks a rank."""
    unit = 2 * size
    random = np.random.default_rng(0).lognormal(0, 1.2, 16)
    uneven = [max(unit, int(options.tokens * x / random.sum()) // unit * unit) for x in random]
    uneven[int(np.argmax(uneven))] += options.tokens - sum(uneven)
    equal = [options.tokens // 16] * 16
    made = partial(Case, length=options.tokens, heads=options.heads, kv_heads=options.kv_heads, dim=options.dim)
    return [made("16 uneven documents", documents=tuple(uneven)), made("16 equal documents", documents=tuple(equal))]


class System:
    """How a system lays the sequence out, and its attention: ``take`` of a whole tensor, ``attention(q, k, v)`` of this rank's."""

    def __init__(self, order: torch.Tensor, attention: Callable[..., torch.Tensor]) -> None:
        self.order, self.attention = order, attention  # order [local]: which tokens this rank has, -1 for padding

    def prepared(self, whole: Inputs) -> Prepared:
        index = self.order.to(whole.query.device)
        taken = (x.index_select(1, index.clamp_min(0)) * (index >= 0)[:, None, None] for x in (*whole.qkv, whole.dout))
        return through_torch(self.attention, Inputs(*taken))

    def whole(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """``[1, length, ...]``, of all ranks' parts."""
        found = x.new_empty(1, length, *x.shape[2:])
        for part, order in zip(_of_all_ranks(x), _of_all_ranks(self.order.to(x.device)), strict=True):
            found[:, order[order >= 0]] = part[:, order >= 0]
        return found


def _of_all_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def placed(case: Case, team: Team, told: bool) -> System:
    ends = torch.tensor([0, *case.documents]).cumsum(0)
    batch = {"input_ids": torch.arange(case.length, device=team.device)[None], "cu_seqlens": ends}
    shard = ring_attn.shard_packed(batch, layout="zigzag", pad_to_multiple_of=256)
    arguments = shard.attention if told else {name: ids.clone() for name, ids in shard.attention.items()}
    order = shard.input_ids[0].masked_fill(shard.segment_ids[0] < 0, -1)
    return System(order, partial(ring_attn.ring_attention, causal=True, layout="zigzag", **arguments))


def zigzag(case: Case, team: Team) -> System:
    tokens = torch.arange(case.length, device=team.device)[None]
    batch = ring_attn.shard_batch(tokens, segment_ids=_numbers(case, team), layout="zigzag")
    order = batch.input_ids[0].masked_fill(batch.segment_ids[0] < 0, -1)
    attention = partial(ring_attn.ring_attention, causal=True, layout="zigzag", q_segment_ids=batch.segment_ids)
    return System(order, attention)


def zigzag_varlen(case: Case, team: Team) -> System:
    function = ring_flash_attn("zigzag_ring_flash_attn_varlen").zigzag_ring_flash_attn_varlen_func
    starts = np.cumsum([0, *case.documents])
    order = [
        start + chunk * length // (2 * team.size) + torch.arange(length // (2 * team.size))
        for start, length in zip(starts, case.documents, strict=False)
        for chunk in (team.rank, 2 * team.size - 1 - team.rank)
    ]
    ends = torch.from_numpy(starts // team.size).to(team.device, torch.int32)
    longest = max(case.documents) // team.size
    return System(torch.cat(order), _varlen(partial(function, cu_seqlens=ends, max_seqlen=longest, causal=True)))


def llama3(case: Case, team: Team) -> System:
    module = ring_flash_attn("llama3_flash_attn_varlen")
    ends = torch.tensor([0, *case.documents], device=team.device).cumsum(0).to(torch.int32)
    q_ends, k_ends, q_most, k_most, keys = module.llama3_flash_attn_prepare_cu_seqlens(ends, True, team.rank, team.size)
    function = partial(
        module.llama3_flash_attn_varlen_func,
        cu_seqlens_q=q_ends,
        cu_seqlens_k=k_ends,
        max_seqlen_q=q_most,
        max_seqlen_k=k_most,
        heads_k_stride=max(1, case.kv_heads // 4),
        local_k_slice=keys,
        causal=True,
    )
    local = case.length // team.size
    return System(team.rank * local + torch.arange(local), _varlen(function))


def _varlen(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: function(q[0], k[0], v[0])[None]


def _numbers(case: Case, team: Team) -> torch.Tensor:
    lengths = torch.tensor(case.documents, device=team.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=team.device), lengths)[None]


SYSTEMS: dict[str, Callable[..., System]] = {
    "placed": partial(placed, told=True),
    "placed, ids": partial(placed, told=False),
    "zigzag": zigzag,
    "zigzag varlen": zigzag_varlen,
    "llama3": llama3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=60.0)
    parser.add_argument("--profile", action="store_true", help="where the time of both passes goes, on the first rank's GPU")
    parser.add_argument("--output", type=Path, default=default_folder("ring-packed"))
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads
    team = Team()
    report = Report(options.output if team.rank == 0 else None, f"Packed documents on {team.size} GPUs")
    for case in cases(options, team.size):
        compare(team, options, case, report)
    report.finish()
    team.close()


def compare(team: Team, options: argparse.Namespace, case: Case, report: Report) -> None:
    ready: dict[str, Prepared] = {}
    truth: list[torch.Tensor] = []
    for name in options.systems:
        made = checked(team, report, case.name, name, partial(prepared, team, case, name), truth)
        if made is not None:
            ready[name] = made
    for phase in PHASES:
        timed = {name: made.passes[phase] for name, made in ready.items()}
        times, failed = take_turns(team, timed, options.rounds, options.sample_ms)
        for name, taken in times.items():
            median = team.slowest(taken.median)
            rate = case.tflop(phase) / team.size / median * 1000
            report.add(case=case.name, system=name, phase=phase, **taken.figures() | {"ms": median, "tflops": rate})
        for name, error in failed.items():
            report.add(case=case.name, system=name, phase=phase, failed=reason(error))
    for name, made in ready.items() if options.profile else ():
        events = recorded(made.passes["both"].call, team.ready)
        report.add(case=case.name, system=name, phase="profile", **split(events, kind, KINDS), **of_device())
        report.say("\n".join(longest(events)))


def of_device() -> dict[str, float]:
    return {"device, GiB": torch.cuda.device_memory_used() / GIB} if ON_GPU else {}


def longest(events: list[Event], most: int = 14) -> list[str]:
    """What took longest: microseconds in all, how often, and its name."""
    taken, often = Counter[str](), Counter[str]()
    for event in events:
        taken[event.name] += round(event.length)
        often[event.name] += 1
    return [f"    {us:7} us, {often[name]:3} times: {name[:110]}" for name, us in taken.most_common(most)]


def prepared(team: Team, case: Case, name: str) -> tuple[Prepared, list[torch.Tensor]]:
    system = SYSTEMS[name](case, team)
    made = system.prepared(make_inputs(case, team.device))
    return made, [system.whole(x, case.length) for x in made.results("both")]


if __name__ == "__main__":
    main()
