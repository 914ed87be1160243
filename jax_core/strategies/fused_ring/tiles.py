"""One tile of scores, and which tiles there are.

A tile stands as ``[keys, queries]``: what belongs to a query (maximum, sum, LSE, delta) is a row, which a TPU reduces and
broadcasts along sublanes, and is stored without padding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_core.kernels.contract import Scores
from jax_core.masks.layout import Run
from jax_core.masks.static import Mask, empty, full, visible
from jax_core.strategies.fused_ring.plan import Plan, Side


class Tile(NamedTuple):
    """Where a tile stands. The runs end with the shard's positions; what is behind them is padding."""

    q_run: Run
    k_run: Run
    k_block: int


def make_tile(plan: Plan, q_halves, k_halves, q_index, k_index) -> Tile:
    """``q_index``, ``k_index``: among the blocks of both halves, in order."""
    return Tile(_block_run(plan.q, q_halves, q_index), _block_run(plan.k, k_halves, k_index), plan.k.block)


def _block_run(side: Side, both: tuple[Run, Run], index) -> Run:
    first, second = both
    in_second = index >= side.blocks
    start = jnp.where(in_second, second.start, first.start)
    length = jnp.where(in_second, second.length, first.length)
    before = (index - jnp.where(in_second, side.blocks, 0)) * side.block
    within: Any = jnp.minimum(length - before, side.block)  # traced, as only the ends of the run are looked at
    return Run(start + first.stride * before, first.stride, within)


def has_pairs(mask: Mask, tile: Tile):
    """False only of tiles without a visible pair."""
    return (tile.q_run.length > 0) & (tile.k_run.length > 0) & jnp.logical_not(empty(mask, tile.q_run, tile.k_run))


def is_full(plan: Plan, tile: Tile):
    """Every key of the tile is visible to every query, so that nothing needs hiding."""
    whole = tile.k_run.length == tile.k_block
    return whole & full(plan.scores.mask, tile.q_run, tile.k_run) & (not plan.segments)


def logits(scores: Scores, q, k, hidden_by=None):
    """``(x [keys, queries] float32, tanh or None)`` of blocks ``q [queries, dim]``, ``k [keys, dim]``; ``hidden_by``: None, or
    ``(tile, q_segments, k_segments)``, whose masks make hidden pairs ``-inf``. ``tanh`` is the soft cap's."""
    x, tanh = product(k, q, (1, 1), scores) * scores.scale, None
    if scores.softcap is not None:
        tanh = jnp.tanh(x / scores.softcap)
        x = tanh * scores.softcap
    if hidden_by is not None:
        x = jnp.where(_visible(scores.mask, x.shape, *hidden_by), x, -jnp.inf)
    return x, tanh


def _visible(mask: Mask, shape: tuple[int, ...], tile: Tile, q_segments, k_segments):
    """``q_segments [1, queries]``, ``k_segments [1, keys]``, or None."""
    k_index, q_index = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    (q_start, q_stride, _), (k_start, k_stride, k_length) = tile.q_run, tile.k_run
    seen = visible(mask, q_start + q_stride * q_index, k_start + k_stride * k_index) & (k_index < k_length)
    if q_segments is not None:
        seen = seen & (q_segments == as_column(k_segments)) & (q_segments >= 0)
    return seen


def as_column(row):
    """``[1, n] -> [n, 1]``"""
    return jnp.transpose(jnp.broadcast_to(row, (128, row.shape[1])))[:, :1]


def logits_gradient(scores: Scores, weights, dweights, delta, tanh):
    """The gradient of ``q . k``, without the scale, from those of the weights; ``delta [1, queries]``."""
    dx = weights * (dweights - delta)
    return dx if tanh is None else dx * (1 - tanh * tanh)


def product(a, b, contract: tuple[int, int], scores: Scores) -> jax.Array:
    """A matrix product that sums dimension ``contract[0]`` of ``a`` and ``contract[1]`` of ``b`` in float32; float32 is multiplied
    in full unless the precision says less, 16 bits as the matrix unit does."""
    precision: Any = scores.precision or (lax.Precision.HIGHEST if b.dtype == jnp.float32 else None)
    dimensions = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(a.astype(b.dtype), b, dimensions, precision=precision, preferred_element_type=jnp.float32)
