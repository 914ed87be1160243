"""One tile of scores, and which tiles have visible pairs.

A tile is ``[keys, queries]``: per-query statistics (maximum, denominator, LSE, delta) are a row, which a TPU reduces and broadcasts
along sublanes and stores without padding.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.blocks import scaled
from jax_core.kernels.contract import Scores
from jax_core.kernels.tpu.scores import column, product, through_softcap
from jax_core.masks.layout import Run
from jax_core.masks.static import Mask, empty, full, visible
from jax_core.strategies.fused_ring.constants import HalvedShard, RingConstants

Halves = tuple[Run, Run]


class Tile(NamedTuple):
    """The positions of a tile. The runs end where the shard's positions end; the rest of a block is padding."""

    q_run: Run
    k_run: Run
    k_block: int


class HiddenBy(NamedTuple):
    """What hides pairs of a tile; ``q_segments [1, queries]``, ``k_segments [1, keys]``, or None."""

    tile: Tile
    q_segments: Array | None
    k_segments: Array | None


def make_tile(const: RingConstants, q_halves: Halves, k_halves: Halves, q_index: Array, k_index: Array) -> Tile:
    """``q_index``, ``k_index``: block indices that count through both halves."""
    return Tile(_block_run(const.q, q_halves, q_index), _block_run(const.k, k_halves, k_index), const.k.block)


def _block_run(shard: HalvedShard, both: Halves, index: Array) -> Run:
    first, second = both
    in_second = index >= shard.blocks
    start = jnp.where(in_second, second.start, first.start)
    length = jnp.where(in_second, second.length, first.length)
    before = (index - jnp.where(in_second, shard.blocks, 0)) * shard.block
    within: Any = jnp.minimum(length - before, shard.block)  # may be traced, since only the ends of the run are read
    return Run(start + first.stride * before, first.stride, within)


def has_pairs(mask: Mask, tile: Tile) -> Array:
    """False only for tiles without a visible pair."""
    return (tile.q_run.length > 0) & (tile.k_run.length > 0) & jnp.logical_not(empty(mask, tile.q_run, tile.k_run))


def is_full(const: RingConstants, tile: Tile) -> Array:
    """Every key of the tile is visible to every query, so that no mask is needed."""
    whole = tile.k_run.length == tile.k_block
    return whole & full(const.scores.mask, tile.q_run, tile.k_run) & (not const.segments)


def logits(scores: Scores, q: Array, k: Array, hidden_by: HiddenBy | None) -> tuple[Array, Array | None]:
    """``(x [keys, queries] float32, tanh or None)`` of blocks ``q [queries, dim]``, ``k [keys, dim]``; ``-inf`` where hidden.
    ``tanh`` is the soft cap's."""
    x, tanh = scaled(scores, product(k, q, (1, 1), scores))
    if hidden_by is not None:
        x = jnp.where(_visible(scores.mask, x.shape, hidden_by), x, -jnp.inf)
    return x, tanh


def _visible(mask: Mask, shape: tuple[int, ...], hidden_by: HiddenBy) -> Array:
    k_index, q_index = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    (q_start, q_stride, _), (k_start, k_stride, k_length) = hidden_by.tile.q_run, hidden_by.tile.k_run
    seen = visible(mask, q_start + q_stride * q_index, k_start + k_stride * k_index) & (k_index < k_length)
    if hidden_by.q_segments is not None and hidden_by.k_segments is not None:
        seen = seen & (hidden_by.q_segments == column(hidden_by.k_segments)) & (hidden_by.q_segments >= 0)
    return seen


def logits_gradient(weights: Array, dweights: Array, delta: Array, tanh: Array | None) -> Array:
    """The gradient of ``q . k``, not yet multiplied by the scale, from that of the weights; ``delta [1, queries]``."""
    return through_softcap(weights * (dweights - delta), tanh)
