"""A pair of shards in a causal zigzag ring, as two tiles of one call.

A zigzag shard is two runs, an early and a late one. Of the four tiles of two ranks' shards two are visible, both fully. The late
queries always see the early keys. If the keys are from a lower rank (``before``), the early queries see them too; otherwise the
late queries also see the late keys. Only the device knows which, so both cases are one program::

    before:  early q . early k,  late q . early k          else:  late q . early k,  late q . late k

The two tiles lie in the batch dimension of one call: ``[batch, length, ...] <-> [2 * batch, length / 2, ...]`` moves nothing.
"""

import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import Partial


def query_tiles(x: Array, before: Array) -> Array:
    """The query rows of the two tiles: ``[batch, length, ...] -> [2 * batch, length / 2, ...]``."""
    runs = _split(x)
    return _as_batch(jnp.where(before, runs, runs[:, 1:]))


def key_tiles(x: Array, before: Array) -> Array:
    runs = _split(x)
    return _as_batch(jnp.where(before, runs[:, :1], runs))


def row_tiles(x: Array, before: Array) -> Array:
    """:func:`query_tiles` for ``[batch, heads, length]``."""
    return jnp.swapaxes(query_tiles(jnp.swapaxes(x, 1, 2), before), 1, 2)


def partials(out: Array, lse: Array, before: Array) -> list[Partial]:
    """The two tiles' results as two partials of the whole shard: tiles already in their queries' rows and, unless ``before``, the
    first tile's result moved to the late queries' rows."""
    tiles, sums = _split_batch(out), _split_batch(lse)
    here = jnp.where(_at(1, sums) | before, sums, -jnp.inf)
    there = jnp.where(_at(1, sums) & jnp.logical_not(before), sums[:, :1], -jnp.inf)
    first = jnp.broadcast_to(tiles[:, :1], tiles.shape)
    return [Partial(_join(tiles), _join_rows(here)), Partial(_join(first), _join_rows(there))]


def query_gradient(tiles: Array, before: Array) -> Array:
    """``[2 * batch, length / 2, ...] -> [batch, length, ...]``: the transpose of :func:`query_tiles`, in float32."""
    tiles = _split_batch(tiles.astype(jnp.float32))
    return _join(jnp.where(before, tiles, _both_in(1, tiles)))


def key_gradient(tiles: Array, before: Array) -> Array:
    tiles = _split_batch(tiles.astype(jnp.float32))
    return _join(jnp.where(before, _both_in(0, tiles), tiles))


def _both_in(place: int, tiles: Array) -> Array:
    """The sum of the two tiles at index ``place``, 0 at the other index."""
    return jnp.where(_at(place, tiles), tiles[:, :1] + tiles[:, 1:], 0)


def _at(place: int, tiles: Array) -> Array:
    """Which of ``tiles [batch, 2, ...]`` are at index ``place``, in a shape that broadcasts."""
    return jnp.arange(2).reshape(2, *[1] * (tiles.ndim - 2)) == place


def _split(x: Array) -> Array:
    """``[batch, length, ...] -> [batch, 2, length / 2, ...]``"""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:])


def _join(x: Array) -> Array:
    return x.reshape(x.shape[0], 2 * x.shape[2], *x.shape[3:])


def _as_batch(x: Array) -> Array:
    return x.reshape(2 * x.shape[0], *x.shape[2:])


def _split_batch(x: Array) -> Array:
    """``[2 * batch, ...] -> [batch, 2, ...]``"""
    return x.reshape(x.shape[0] // 2, 2, *x.shape[1:])


def _join_rows(x: Array) -> Array:
    """``[batch, 2, heads, length / 2] -> [batch, heads, length]``"""
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)
