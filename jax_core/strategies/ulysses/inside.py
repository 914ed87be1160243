"""What is left to the inner strategy: a ring over the other axis, with longer shards and fewer heads."""

from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from jax import Array

from jax_core.kernels.contract import Problem
from jax_core.masks.layout import Index, Layout, Run, feature, padded_length, runs, shard_multiple
from jax_core.operands import EIGHTHS
from jax_core.options import AxisName
from jax_core.strategies.contract import RingSpec, Strategy

_SEEN_BY_HEAD = frozenset("dropout_prob predicates".split())  # what goes by the global number of a head


class UlyssesAxis(NamedTuple):
    """The mesh axis (or axes) of the exchange, its size, and this rank's place along it."""

    name: AxisName
    size: int
    place: int | Array


def ulysses_axis(spec: RingSpec, axis: int | None, rank: int | Array) -> UlyssesAxis:
    if axis is None:
        return UlyssesAxis(spec.axis_name, spec.problem.size, rank)
    assert isinstance(spec.axis_name, tuple)
    place = rank // spec.problem.sizes[1] if axis == 0 else rank % spec.problem.sizes[1]
    return UlyssesAxis(spec.axis_name[axis], spec.problem.sizes[axis], place)


def unsupported(problem: Problem, axis: int | None) -> str | None:
    if axis is not None and len(problem.sizes) != 2:
        return f"it needs two mesh axes, one for the heads and one for the ring; got {len(problem.sizes)}"
    size = exchanged_over(problem, axis)
    if problem.heads % size:
        return f"it splits the heads evenly: their number must be a multiple of the {size} ranks; got {problem.heads} heads"
    if axis is not None and not isinstance(problem.layout, str):
        return "a plan does not stay one when ranks of a second axis exchange their shards; use ulysses over all ranks, or a ring"
    return None


def kv_heads_sent(kv_heads: int, size: int) -> int:
    """K/V heads, each repeated as few times as lets ``size`` ranks have equally many."""
    return lcm(kv_heads, size)


def exchanged_over(problem: Problem, axis: int | None) -> int:
    """How many ranks exchange heads for positions."""
    return problem.size if axis is None else problem.sizes[axis]


def problem_inside(problem: Problem, axis: int | None) -> Problem:
    size = exchanged_over(problem, axis)
    if problem.heads % size:
        return problem  # refused for it
    layout, ring = _layout_inside(problem.layout, problem.sizes, axis), problem.size // size
    features = problem.features - {feature(problem.layout)} | {feature(layout)}
    if problem.placed:  # the table is of the ranks' own shards, not of those that are joined: kernels go by ids
        problem = replace(problem, documents=0, placed=False, shared_eighths=EIGHTHS)
    return replace(
        problem,
        heads=problem.heads // size,
        kv_heads=kv_heads_sent(problem.kv_heads, size) // size,
        q_length=problem.q_length * size,
        k_length=problem.k_length * size,
        layout=layout,
        size=ring,
        sizes=(ring,),
        features=features | ({"origin"} if features & _SEEN_BY_HEAD else set()),
    )


def spec_inside(spec: RingSpec, inner: Strategy, axis: int | None) -> RingSpec:
    name = None if axis is None else spec.axis_name[1 - axis]  # type: ignore[index]
    return replace(spec, problem=problem_inside(spec.problem, axis), strategy=inner, axis_name=name)


def order(layout: Layout, alone: bool) -> Layout:
    """The layout by which ``exchange.in_sequence_order`` joins shards to the inner one. ``alone``: they are the whole sequence."""
    return layout if alone or layout == "zigzag" else "contiguous"


def _layout_inside(layout: Layout, sizes: tuple[int, ...], axis: int | None) -> Layout:
    if axis is None or sizes[1 - axis] == 1:
        return "contiguous"  # the whole sequence
    if sizes[axis] == 1:
        return layout  # nothing is exchanged
    if axis == 1 and layout != "striped":
        return layout  # neighbours of the sequence exchange: their shards are one, of the same layout
    return JoinedShards(layout, sizes[axis], axis == 1)


@dataclass(frozen=True)
class JoinedShards:
    """The layout of a ring of which every rank has the shards of ``count`` ranks: with the exchange's axis first in the mesh (or,
    ``neighbours``, last). An :class:`jax_core.masks.layout.Arrangement`."""

    layout: Layout
    count: int
    neighbours: bool
    feature = "plan"

    @property
    def shard_multiple(self) -> int:
        return self.count * shard_multiple(self.layout)

    def runs(self, rank: Index, size: int, length: int) -> tuple[Run, ...]:
        places = range(self.count)
        ranks = [rank * self.count + place if self.neighbours else place * size + rank for place in places]
        shards = [runs(self.layout, member, size * self.count, length // self.count) for member in ranks]
        joined = (*(shard[0] for shard in shards), *(run for shard in shards[::-1] for run in shard[1:]))
        return joined if len(joined) > 2 else _halved(joined)

    def check_size(self, size: int) -> None:
        """Any will do."""

    def check_shard_length(self, length: int, name: str, size: int) -> None:
        """Checked before the exchange."""

    def padded_length(self, size: int, length: int) -> int:
        return padded_length(self.layout, size * self.count, length)

    def __str__(self) -> str:
        return f"{self.layout} shards of {self.count} ranks"


def _halved(shard: tuple[Run, ...]) -> tuple[Run, ...]:
    """More than two runs, since two would mean zigzag."""
    half = shard[0].length // 2
    if shard[0].length % 2:
        return shard
    return tuple(run._replace(start=run.start + i * run.stride * half, length=half) for run in shard for i in (0, 1))
