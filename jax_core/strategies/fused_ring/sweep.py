"""One sweep of a kernel over all tiles of a step: which blocks each tile fetches into VMEM."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_core.strategies.fused_ring.constants import SLOTS, Refs, RingConstants, halves
from jax_core.strategies.fused_ring.rotation import HALVES, source
from jax_core.strategies.fused_ring.tiles import Halves, HiddenBy, Tile, has_pairs, is_full, make_tile


@dataclass(frozen=True)
class Sweep:
    """A block of queries stays in VMEM while all blocks of keys pass; with ``over_queries``, keys stay and queries pass.

    The grid is ``(batch, head, block that stays, block that passes)``; keys stay for all query heads of their group. A tile without
    visible pairs fetches no block: its index is that of block 0, which the pipeline does not fetch twice in a row.
    """

    const: RingConstants
    q_halves: Halves
    k_halves: Halves
    slot: Array
    over_queries: bool

    @property
    def grid(self) -> tuple[int, int, int, int]:
        const = self.const
        q_blocks, k_blocks = 2 * const.q.blocks, 2 * const.k.blocks
        if self.over_queries:
            return const.batch, const.kv_heads, k_blocks, const.group * q_blocks
        return const.batch, const.heads, q_blocks, k_blocks

    def tile(self, *at: Array) -> Tile:
        _, _, i, j = self._place(*at)
        return make_tile(self.const, self.q_halves, self.k_halves, i, j)

    def rows(self, dim: int) -> pl.BlockSpec:
        """For arrays ``[batch, heads, positions, dim]`` of queries."""
        return pl.BlockSpec((None, None, self.const.q.block, dim), lambda *at: (*self._queries(*at), 0))

    def columns(self, dim: int) -> pl.BlockSpec:
        """For arrays ``[batch, heads, dim, positions]`` of queries."""

        def index(*at: Array) -> tuple[Array | int, ...]:
            b, head, i = self._queries(*at)
            return b, head, 0, i

        return pl.BlockSpec((None, None, dim, self.const.q.block), index)

    def keys(self, dim: int) -> pl.BlockSpec:
        """For arrays ``[2, SLOTS, batch, kv_heads, positions of a half, dim]``."""
        return pl.BlockSpec((None, None, None, None, self.const.k.block, dim), lambda *at: (*self._keys(*at), 0))

    def segments(self) -> dict[str, pl.BlockSpec]:
        """For ``q_segments [batch, 1, positions]`` and ``k_segments [2, SLOTS, batch, 1, positions of a half]``."""

        def of_queries(*at: Array) -> tuple[Array | int, ...]:
            b, _, i = self._queries(*at)
            return b, 0, i

        def of_keys(*at: Array) -> tuple[Array | int, ...]:
            half, slot, b, _, j = self._keys(*at)
            return half, slot, b, 0, j

        blocks = (None, 1, self.const.q.block), (None, None, None, 1, self.const.k.block)
        return {"q_segments": pl.BlockSpec(blocks[0], of_queries), "k_segments": pl.BlockSpec(blocks[1], of_keys)}

    def _place(self, b: Array, head: Array, stays: Array, passes: Array) -> tuple[Array, Array, Array, Array]:
        """``(batch entry, query head, query block, key block)``"""
        if not self.over_queries:
            return b, head, stays, passes
        blocks = 2 * self.const.q.blocks
        return b, head * self.const.group + lax.div(passes, blocks), lax.rem(passes, blocks), stays

    def _queries(self, *at: Array) -> tuple[Array, Array, Array]:
        b, head, i, _ = self._place(*at)
        return b, head, self._if_it_has_pairs(i, at) if self.over_queries else i

    def _keys(self, *at: Array) -> tuple[Array, Array, Array, Array, Array]:
        b, head, _, j = self._place(*at)
        half = lax.div(j, self.const.k.blocks)
        block = j - half * self.const.k.blocks
        return half, self.slot, b, lax.div(head, self.const.group), block if self.over_queries else self._if_it_has_pairs(block, at)

    def _if_it_has_pairs(self, block: Array, at: tuple[Array, ...]) -> Array:
        return jnp.where(has_pairs(self.const.scores.mask, self.tile(*at)), block, 0)


def make_sweep(const: RingConstants, rank: Array, step: Array, over_queries: bool) -> Sweep:
    """The sweep over the rank's queries and the halves held at ``step``."""
    q_halves = halves(const.layout, rank, const.size, const.q.length)
    first, second = (halves(const.layout, source(const, rank, half, step), const.size, const.k.length)[half] for half in HALVES)
    return Sweep(const, q_halves, (first, second), lax.rem(step, SLOTS), over_queries)


def ends() -> tuple[Array, Array]:
    """Whether this is the first, and whether it is the last, of the blocks that pass the one that stays."""
    return pl.program_id(3) == 0, pl.program_id(3) == pl.num_programs(3) - 1


def for_each_kind(sweep: Sweep, blocks: Refs, add: Callable[[HiddenBy | None], None]) -> None:
    """Calls ``add(hidden_by)`` as the current tile needs it: not at all without visible pairs, with None if nothing is hidden."""
    tile = sweep.tile(*(pl.program_id(axis) for axis in range(4)))
    seen, whole = has_pairs(sweep.const.scores.mask, tile), is_full(sweep.const, tile)

    @pl.when(seen & whole)
    def _() -> None:
        add(None)

    @pl.when(seen & jnp.logical_not(whole))
    def _() -> None:
        add(HiddenBy(tile, *(blocks[name][...] if name in blocks else None for name in ("q_segments", "k_segments"))))
