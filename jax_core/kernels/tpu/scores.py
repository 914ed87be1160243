"""Matrix products, and tiles of scores inside the Pallas kernels: queries x keys or, transposed, keys x queries.

A transposed tile has its queries' statistics along the lanes, as they are stored; the dK/dV sweep uses it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, Ref, lax

from jax_core.kernels.blocks import BlockLayout, scaled
from jax_core.kernels.blocks import distance as block_distance
from jax_core.kernels.contract import Scores
from jax_core.kernels.tpu.constants import BlockedExtras, TileConstants, quotient, remainder
from jax_core.masks.dropout import threefry_2x32, threshold
from jax_core.masks.functions import Predicate
from jax_core.masks.static import visible


def product(a: Array, b: Array, axes: tuple[int, int], scores: Scores) -> Array:
    """A matrix product that sums axis ``axes[0]`` of ``a`` and ``axes[1]`` of ``b``, in float32. Float32 inputs are multiplied in
    full precision unless the scores ask for less; 16-bit inputs as the matrix unit does by default."""
    precision = scores.precision
    if precision is None and a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def through_softcap(gradient: Array, tanh: Array | None) -> Array:
    """The gradient of the soft cap's input, from that of its output."""
    return gradient if tanh is None else gradient * (1 - tanh * tanh)


def column(row: Array) -> Array:
    """``[1, n] -> [n, 1]``"""
    return jnp.expand_dims(row[0], -1)


def row(column: Array) -> Array:
    """``[n, 1] -> [1, n]``"""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]


class TileIndex(NamedTuple):
    """A tile's local batch entry, head, query block and key block, and a reference to the result of `make_scalars`."""

    batch: Array
    head: Array
    q: Array
    k: Array
    scalars: Ref


class Tile(NamedTuple):
    """The logits, ``-inf`` where hidden; the soft cap's tanh, the weights that dropout keeps, and ``|q - k|`` may be None."""

    logits: Array
    tanh: Array | None
    keep_mask: Array | None
    distance: Array | None


def make_tile(
    const: TileConstants, at: TileIndex, q: Array, k: Array, blocked: BlockedExtras[Ref], masked: bool, transposed: bool
) -> Tile:
    scores = const.scores
    x = product(k, q, (1, 1), scores) if transposed else product(q, k, (1, 1), scores)
    if scores.logits_dtype is not None:
        x = x.astype(scores.logits_dtype).astype(jnp.float32)
    (x, tanh), distance = scaled(scores, x), None
    if blocked.bias is not None:
        x = x + _transposed(blocked.bias[...].astype(jnp.float32), transposed)
    indices = _indices(const, at, x.shape, transposed)
    positions = _positions(indices, blocked, transposed)
    if blocked.slopes is not None:
        distance = block_distance(scores.mask, *positions, jnp.float32)
        x = x - _slope(const, at, blocked.slopes) * distance
    if masked:
        x = jnp.where(_seen(const, at, indices, positions, blocked, transposed), x, -jnp.inf)
    return Tile(x, tanh, _keep_mask(const, at, indices), distance)


def _slope(const: TileConstants, at: TileIndex, slopes: Ref) -> Array:
    shared = slopes.shape[1] == const.heads
    return slopes[0, at.head if shared else at.batch * const.heads + at.head]


class _Indices(NamedTuple):
    """The indices of a tile's queries and keys in the whole sequence, each with the tile's shape; ``real``: False where a key only
    pads its block (None: no padding)."""

    q: Array
    k: Array
    real: Array | None


def _indices(const: TileConstants, at: TileIndex, shape: tuple[int, ...], transposed: bool) -> _Indices:
    q, _ = _indices_of(const.q, at.q, at.scalars, 0, shape, 1 if transposed else 0)
    k, real = _indices_of(const.k, at.k, at.scalars, const.q.runs, shape, 0 if transposed else 1)
    return _Indices(q, k, real)


def _indices_of(
    where: BlockLayout, block: Array, scalars: Ref, first: int, shape: tuple[int, ...], axis: int
) -> tuple[Array, Array | None]:
    in_run = remainder(block, where.blocks_per_run) * where.block + lax.broadcasted_iota(jnp.int32, shape, axis)
    start = scalars[first] if where.runs == 1 else scalars[first + quotient(block, where.blocks_per_run)]
    return start + where.stride * in_run, None if where.even else in_run < where.length


def _positions(indices: _Indices, blocked: BlockedExtras[Ref], transposed: bool) -> tuple[Array, Array]:
    if blocked.q_positions is None or blocked.k_positions is None:
        return indices.q, indices.k
    return _broadcasting(blocked.q_positions, blocked.k_positions, transposed)


def _broadcasting(q_row: Ref, k_row: Ref, transposed: bool) -> tuple[Array, Array]:
    """A row of queries and a row of keys, in shapes that broadcast over a tile."""
    return (q_row[...], column(k_row[...])) if transposed else (column(q_row[...]), k_row[...])


def _transposed(x: Array, transposed: bool) -> Array:
    if not transposed:
        return x
    return column(x) if x.shape[0] == 1 else x.T


def _seen(
    const: TileConstants,
    at: TileIndex,
    indices: _Indices,
    positions: tuple[Array, Array],
    blocked: BlockedExtras[Ref],
    transposed: bool,
) -> Array:
    seen = visible(const.scores.mask, *positions)
    if blocked.q_segments is not None and blocked.k_segments is not None:
        q, k = _broadcasting(blocked.q_segments, blocked.k_segments, transposed)
        seen = seen & (q == k) & (q >= 0)
    if indices.real is not None:
        seen = seen & indices.real
    if blocked.mask is not None:
        seen = seen & (_transposed(blocked.mask[...].astype(jnp.int32), transposed) != 0)
    for predicate in const.in_kernel:
        seen = seen & _evaluate(predicate, const, at, indices, positions)
    return seen


def _evaluate(
    predicate: Predicate, const: TileConstants, at: TileIndex, indices: _Indices, positions: tuple[Array, Array]
) -> Array:
    assert predicate.elementwise is not None
    q, k = positions if predicate.over == "position" else (indices.q, indices.k)
    q, k = (jnp.broadcast_to(x, indices.q.shape) for x in (q, k))
    return predicate.elementwise(*_global(const, at), q, k)


def _global(const: TileConstants, at: TileIndex) -> tuple[Array, Array]:
    """The global batch entry and head."""
    return at.scalars[const.origin] + at.batch, at.scalars[const.origin + 1] + at.head


def _keep_mask(const: TileConstants, at: TileIndex, indices: _Indices) -> Array | None:
    """As ``dropout.keep_mask``, but compares signed numbers, as the hardware does."""
    if not const.scores.dropout_prob:
        return None
    seed = at.scalars[const.origin + 2], at.scalars[const.origin + 3]
    key = threefry_2x32(tuple(lax.bitcast_convert_type(x, jnp.uint32) for x in seed), _global(const, at))
    bits, _ = threefry_2x32(key, (indices.q, indices.k))
    limit = jnp.uint32(threshold(const.scores.dropout_prob))
    signed = (lax.bitcast_convert_type(x ^ jnp.uint32(1 << 31), jnp.int32) for x in (bits, limit))
    low, high = signed
    return low >= high


def dropped(const: TileConstants, tile: Tile, x: Array) -> Array:
    """``x`` where dropout keeps the weight, scaled so that sums keep their expectation; 0 elsewhere."""
    return x if tile.keep_mask is None else jnp.where(tile.keep_mask, x * (1 / (1 - const.scores.dropout_prob)), 0.0)


def logit_gradient(const: TileConstants, tile: Tile, weights: Array, dweights: Array, delta: Array) -> tuple[Array, Array]:
    """The gradients of the logits and of ``q . k``."""
    dlogits = weights * (dropped(const, tile, dweights) - delta)
    return dlogits, through_softcap(dlogits * const.scores.scale, tile.tanh)
