"""Layers with a state over a ring, beside one GPU and beside fla's own context parallelism, in one run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ring.states [--systems ...] [--tokens 32768] [--output FOLDER]

The gated delta rule and SSD, bfloat16, 64 heads of 128 (SSD: a state of 128), called from torch, forward and forward with backward.
The systems take turns; a time is the median of the slowest rank's. "rate" is tokens a second and GPU, as a part of what one GPU
does with all tokens: 1 where nothing is lost.

one GPU              the whole sequence on each GPU
ring                 contiguous shards, and what "auto" sends; "zigzag" and "ulysses" say what else
ring, by fla         the same, where fla's kernels compute a rank's tokens; "zigzag, by fla" so
fla, one GPU         flash-linear-attention's kernels on the whole sequence, where it is installed
fla, cp              the same over all GPUs, by its own context parallelism (contiguous)
ring, by mamba_ssm   and "mamba_ssm, one GPU", of SSD: the same with mamba_ssm's kernels

On a CPU: --tokens 512 --heads 2 --dim 16.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from benchmarks.harness.checked import checked
from benchmarks.harness.report import Report, default_folder
from benchmarks.harness.team import ON_GPU, Team, tidy
from benchmarks.harness.timing import Timed, reason, take_turns
from ring_attn import Ring
from torch_bridge.start import runtime

Operands = dict[str, Tensor]  # whole ones: [1, tokens, heads, ...], or [heads]
Layer = Callable[..., Tensor]
ALONE = "one GPU"
SLOW = 0.01  # of decays, so that what a shard leaves reaches far into the next
KINDS = (("ring", "contiguous", "auto"), ("zigzag", "zigzag", "prefix"), ("ulysses", "contiguous", "ulysses"))
FLA, MAMBA = "fla, one GPU", "mamba_ssm, one GPU"
OF_FLA = (FLA, "ring, by fla", "zigzag, by fla", "fla, cp")
OF_MAMBA = (MAMBA, "ring, by mamba_ssm", "zigzag, by mamba_ssm")
SYSTEMS = (ALONE, *(kind[0] for kind in KINDS), *OF_FLA, *OF_MAMBA)
CHUNK = 256  # of mamba_ssm's kernels, as Mamba-2's own layers have it


def delta_rule(make: Callable[..., Tensor], tokens: int, heads: int, dim: int) -> Operands:
    q, k, v = (make(1, tokens, heads, dim) for _ in range(3))
    return {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v,
        "g": -SLOW * F.softplus(make(1, tokens, heads).float()),
        "beta": make(1, tokens, heads).sigmoid(),
    }


def ssd(make: Callable[..., Tensor], tokens: int, heads: int, dim: int) -> Operands:
    return {
        "x": make(1, tokens, heads, dim),
        "dt": F.softplus(make(1, tokens, heads).float()),
        "A": -SLOW * make(heads).float().exp(),
        "B": make(1, tokens, 1, dim),
        "C": make(1, tokens, 1, dim),
    }


CASES = {"gated delta rule": (delta_rule, ring_attn.gated_delta_rule), "SSD": (ssd, ring_attn.ssd)}


class System:
    """``layer`` on this rank's part of the operands, and of the whole output's gradient."""

    def __init__(self, layer: Layer, operands: Operands, ring: Ring | None) -> None:
        self.ring = ring
        self._layer = layer
        self._leaves = {name: self._part(x).detach().clone().requires_grad_() for name, x in operands.items()}

    def _part(self, x: Tensor) -> Tensor:
        return x if self.ring is None or x.ndim < 2 else self.ring.shard(x)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._layer(**self._leaves)

    def both(self) -> tuple[Tensor, ...]:
        out = self._layer(**self._leaves)
        return torch.autograd.grad(out, tuple(self._leaves.values()), torch.ones_like(out))

    def whole(self) -> list[Tensor]:
        """The output and the gradients of what is sharded."""
        found = [self.forward(), *(x for x in self.both() if x.ndim > 1)]
        return found if self.ring is None else [self.ring.unshard(x) for x in found]


def systems(case: str, team: Team) -> Iterator[tuple[str, Layer, Ring | None]]:
    layer: Any = CASES[case][1]
    yield ALONE, partial(layer, mesh="local"), None
    if team.size > 1:
        for name, layout, strategy in KINDS:
            ring = Ring(layout=layout)
            yield name, partial(layer, ring=ring, strategy=strategy), ring
    if not ON_GPU:
        return
    of_peer, by_peer, names = (of_fla, by_fla, OF_FLA) if case == "gated delta rule" else (of_mamba, by_mamba, OF_MAMBA)
    yield names[0], of_peer, None
    for name, layout in zip(names[1:3], ("contiguous", "zigzag"), strict=True) if team.size > 1 else ():
        ring = Ring(layout=layout)
        yield name, partial(by_peer, ring=ring), ring
    if team.size > 1 and of_peer is of_fla:
        yield OF_FLA[3], of_fla_over_ranks, Ring(layout="contiguous")


def of_fla(**operands: Any) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    out: Tensor = chunk_gated_delta_rule(**operands)[0]
    return out


def by_fla(ring: Ring, **operands: Any) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out: Any = ring_attn.gated_delta_rule(**operands, ring=ring, operator=chunk_gated_delta_rule)
    return out


def of_mamba(**operands: Any) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    out: Tensor = mamba_chunk_scan_combined(**operands, chunk_size=CHUNK)
    return out


def by_mamba(ring: Ring, **operands: Any) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    out: Any = ring_attn.ssd(**operands, ring=ring, chunk_size=CHUNK, operator=mamba_chunk_scan_combined)
    return out


def of_fla_over_ranks(**operands: Any) -> Tensor:
    query = operands["q"]
    return of_fla(**operands, cp_context=context_of_fla(query.shape[1] * dist.get_world_size(), query.device))


@cache
def context_of_fla(tokens: int, device: torch.device) -> Any:
    from fla.ops.cp import build_cp_context  # type: ignore[import-not-found]

    return build_cp_context(cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device=device), group=dist.group.WORLD)


def compare(team: Team, options: argparse.Namespace, case: str, report: Report) -> None:
    generator = torch.Generator(team.device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=team.device, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    operands = CASES[case][0](make, options.tokens, options.heads, options.dim)
    ready: dict[str, System] = {}
    truth: list[Tensor] = []
    for name, layer, ring in systems(case, team):
        if name not in options.systems:
            continue
        made = checked(team, report, case, name, partial(prepared, layer, operands, ring), truth)
        if made is not None:
            ready[name] = made
    for phase in ("forward", "both"):
        measure(team, options, case, phase, ready, report)
    rate = report.find(case, "ring", "both", "rate")
    if team.size > 1 and rate is not None:
        report.ratio(f"{case}, both: a GPU of the ring / one alone", rate, at_least=0.8)


def prepared(layer: Layer, operands: Operands, ring: Ring | None) -> tuple[System, list[Tensor]]:
    made = System(layer, operands, ring)
    return made, made.whole()


def measure(team: Team, options: argparse.Namespace, case: str, phase: str, ready: dict[str, System], report: Report) -> None:
    times, failed = take_turns(team, {name: Timed(getattr(made, phase)) for name, made in ready.items()}, options.rounds, 60.0)
    medians = {name: team.slowest(taken.median) for name, taken in times.items()}
    for name, taken in times.items():
        alone = medians.get(FLA if name in OF_FLA else MAMBA if name in OF_MAMBA else ALONE)
        ranks = 1 if ready[name].ring is None else team.size
        rate = {} if alone is None else {"rate": alone / medians[name] / ranks}
        report.add(case=case, system=name, phase=phase, **taken.figures() | {"ms": medians[name]} | rate)
    for name, error in failed.items():
        report.add(case=case, system=name, phase=phase, failed=reason(error))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=default_folder("ring-states"))
    options = parser.parse_args(given)
    team = Team()
    runtime.start(device=team.device)  # on all ranks at once, before one GPU's layer is called
    report = Report(options.output if team.rank == 0 else None, f"Layers with a state on {team.size} GPUs")
    for case in options.cases:
        compare(team, options, case, report)
        tidy()
    report.finish()
    team.close()


if __name__ == "__main__":
    main()
