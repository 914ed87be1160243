"""What a fused kernel is compiled for: everything static about a launch, as one constant.

A shard is sent as two halves, one each way round the ring, so that each of a rank's links carries half of it. In zigzag the halves
are the shard's two runs, in the other layouts the two halves of its only run: in every layout a half is one run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array, Ref

from jax_core.kernels.contract import Scores
from jax_core.masks.layout import Index, Layout, Run, runs
from jax_core.masks.static import Mask, empty

ROTATING = ("key", "value", "k_segments")
Refs = dict[str, Ref]  # a kernel's arguments, by name
SLOTS = 2  # buffers of each half: the one in use, and the one that the next half arrives in


@dataclass(frozen=True)
class HalvedShard:
    """A shard of queries or keys: two halves of ``lengths`` positions, each padded to ``blocks`` blocks of ``block`` positions."""

    length: int
    lengths: tuple[int, int]
    block: int
    blocks: int

    @property
    def padded(self) -> int:
        return self.block * self.blocks


@dataclass(frozen=True)
class RingConstants:
    """``axes``: the mesh axes of the ring and their sizes. ``directions``: which way each half is sent (1: to the next rank).
    ``hops``: how many times."""

    q: HalvedShard
    k: HalvedShard
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    layout: Layout
    axes: tuple[tuple[str, int], ...]
    directions: tuple[int, int]
    hops: int
    scores: Scores
    segments: bool

    @property
    def size(self) -> int:
        size = 1
        for _, length in self.axes:
            size *= length
        return size

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def halved(layout: Layout, size: int, length: int, block: int) -> HalvedShard:
    first, second = halves(layout, 0, size, length)
    return HalvedShard(length=length, lengths=(first.length, second.length), block=block, blocks=-(-first.length // block))


def halves(layout: Layout, rank: Index, size: int, length: int) -> tuple[Run, Run]:
    """The positions of the two halves of ``rank``'s shard; the first is the longer one."""
    shard = runs(layout, rank, size, length)
    if len(shard) == 2:
        return shard[0], shard[1]
    (run,) = shard
    first = -(-run.length // 2)
    return Run(run.start, run.stride, first), Run(run.start + first * run.stride, run.stride, run.length - first)


def route(mask: Mask, layout: Layout, size: int, q_length: int, k_length: int) -> tuple[tuple[int, int], int]:
    """``(directions, hops)``: the directions in which the halves reach all ranks that see them in the fewest hops; on a tie,
    opposite directions. (Under a window that looks back, both halves go to the next rank.)"""
    seen = [_seen(mask, layout, size, q_length, k_length, half) for half in (0, 1)]

    def hops(directions: tuple[int, int]) -> int:
        return max((way * shift) % size for way, shifts in zip(directions, seen, strict=True) for shift in shifts)

    best = min(((1, -1), (-1, 1), (1, 1), (-1, -1)), key=hops)
    return best, hops(best)


def _seen(mask: Mask, layout: Layout, size: int, q_length: int, k_length: int, half: int) -> list[int]:
    """The shifts at which some rank sees this half of the shard of the rank ``shift`` ranks before it; always includes 0."""

    def by_anyone(shift: int) -> bool:
        return any(
            not empty(mask, q_run, k_run)
            for rank in range(size)
            for k_run in [halves(layout, (rank - shift) % size, size, k_length)[half]]
            for q_run in halves(layout, rank, size, q_length)
            if q_run.length and k_run.length
        )

    return [shift for shift in range(size) if shift == 0 or by_anyone(shift)]


class Shards(NamedTuple):
    """``query [batch, heads, positions, dim]``, ``q_segments [batch, 1, positions]`` or None. Rotating arrays are in slots: ``key
    [2, SLOTS, batch, kv_heads, positions of a half, dim]``, ``value`` likewise, ``k_segments [2, SLOTS, batch, 1, positions of a
    half]`` or None, with the rank's own in slot 0. Each half's positions are padded to whole blocks."""

    query: Array
    key: Array
    value: Array
    q_segments: Array | None = None
    k_segments: Array | None = None
