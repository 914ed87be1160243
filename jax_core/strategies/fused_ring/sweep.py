"""One pass of a kernel over all tiles of a step: which blocks are brought into VMEM for which tile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_core.masks.layout import Run
from jax_core.strategies.fused_ring.plan import SLOTS, Plan, halves
from jax_core.strategies.fused_ring.rotation import BOTH, source
from jax_core.strategies.fused_ring.tiles import Tile, has_pairs, is_full, make_tile


@dataclass(frozen=True)
class Sweep:
    """Blocks of one side stay (queries, or keys where ``over_queries``) while all blocks of the other side come past them.

    The grid is ``(batch, head, block that stays, block that comes)``; keys stay for all query heads of their group. A block of a
    tile without pairs is not brought: its place in the grid names the first block, again and again.
    """

    plan: Plan
    q_halves: tuple[Run, Run]
    k_halves: tuple[Run, Run]
    slot: Any
    over_queries: bool

    @property
    def grid(self) -> tuple[int, int, int, int]:
        plan = self.plan
        q_blocks, k_blocks = 2 * plan.q.blocks, 2 * plan.k.blocks
        if self.over_queries:
            return plan.batch, plan.kv_heads, k_blocks, plan.group * q_blocks
        return plan.batch, plan.heads, q_blocks, k_blocks

    def tile(self, *at) -> Tile:
        _, _, i, j = self._place(*at)
        return make_tile(self.plan, self.q_halves, self.k_halves, i, j)

    def rows(self, dim: int) -> pl.BlockSpec:
        """Of ``[batch, heads, positions, dim]``, on the queries' side."""
        return pl.BlockSpec((None, None, self.plan.q.block, dim), lambda *at: (*self._queries(*at), 0))

    def columns(self, dim: int) -> pl.BlockSpec:
        """Of ``[batch, heads, dim, positions]``, on the queries' side."""

        def index(*at):
            b, head, i = self._queries(*at)
            return b, head, 0, i

        return pl.BlockSpec((None, None, dim, self.plan.q.block), index)

    def keys(self, dim: int) -> pl.BlockSpec:
        """Of ``[2, SLOTS, batch, kv_heads, positions of a half, dim]``."""
        return pl.BlockSpec((None, None, None, None, self.plan.k.block, dim), lambda *at: (*self._keys(*at), 0))

    def segments(self) -> dict[str, pl.BlockSpec]:
        """Of ``q_segments [batch, 1, positions]``, ``k_segments [2, SLOTS, batch, 1, positions of a half]``."""

        def of_queries(*at):
            b, _, i = self._queries(*at)
            return b, 0, i

        def of_keys(*at):
            half, slot, b, _, j = self._keys(*at)
            return half, slot, b, 0, j

        blocks = (None, 1, self.plan.q.block), (None, None, None, 1, self.plan.k.block)
        return {"q_segments": pl.BlockSpec(blocks[0], of_queries), "k_segments": pl.BlockSpec(blocks[1], of_keys)}

    def _place(self, b, head, stays, comes):
        """``(batch entry, query head, query block, key block)``"""
        if not self.over_queries:
            return b, head, stays, comes
        blocks = 2 * self.plan.q.blocks
        return b, head * self.plan.group + lax.div(comes, blocks), lax.rem(comes, blocks), stays

    def _queries(self, *at):
        b, head, i, _ = self._place(*at)
        return b, head, self._if_it_comes(i, at) if self.over_queries else i

    def _keys(self, *at):
        b, head, _, j = self._place(*at)
        half = lax.div(j, self.plan.k.blocks)
        block = j - half * self.plan.k.blocks
        return half, self.slot, b, lax.div(head, self.plan.group), block if self.over_queries else self._if_it_comes(block, at)

    def _if_it_comes(self, block, at):
        return jnp.where(has_pairs(self.plan.scores.mask, self.tile(*at)), block, 0)


def make_sweep(plan: Plan, rank, step, over_queries: bool) -> Sweep:
    """Over the rank's queries and the halves that are here at ``step``."""
    q_halves = halves(plan.layout, rank, plan.size, plan.q.length)
    first, second = (halves(plan.layout, source(plan, rank, half, step), plan.size, plan.k.length)[half] for half in BOTH)
    return Sweep(plan, q_halves, (first, second), lax.rem(step, SLOTS), over_queries)


def ends():
    """Whether this is the first, and the last, of the blocks that come past the one that stays."""
    return pl.program_id(3) == 0, pl.program_id(3) == pl.num_programs(3) - 1


def for_each_kind(sweep: Sweep, blocks: dict[str, Any], add: Callable[[Any], None]) -> None:
    """``add(hidden_by)`` as the tile at hand is: not at all without pairs, and without masks (None) where nothing is hidden."""
    tile = sweep.tile(*(pl.program_id(axis) for axis in range(4)))
    seen, whole = has_pairs(sweep.plan.scores.mask, tile), is_full(sweep.plan, tile)

    @pl.when(seen & whole)
    def _():
        add(None)

    @pl.when(seen & jnp.logical_not(whole))
    def _():
        add((tile, *(blocks[name][...] if name in blocks else None for name in ("q_segments", "k_segments"))))
