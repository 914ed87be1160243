"""Cost estimates of the launches, for XLA's scheduler and its cost analysis, based on the average visible share."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_core.kernels.blocks import BlockLayout
from jax_core.kernels.tpu.constants import TileConstants


def forward(const: TileConstants, dtype: jnp.dtype) -> pl.CostEstimate:
    return _by_queries(const, dtype, products=(const.dim, const.value_dim), read=0, written=const.value_dim)


def queries(const: TileConstants, dtype: jnp.dtype) -> pl.CostEstimate:
    return _by_queries(const, dtype, products=(const.dim, const.value_dim, const.dim), read=const.value_dim, written=const.dim)


def keys(const: TileConstants, dtype: jnp.dtype, fused: bool) -> pl.CostEstimate:
    """Queries are fetched at every visit; a fused sweep also reads and writes dQ."""
    q, k, dims = _length(const.q), _length(const.k), const.dim + const.value_dim
    fetched = const.heads * const.k.blocks * share(const) * q * (dims * dtype.itemsize + (8 * const.dim if fused else 0))
    once = const.kv_heads * k * dims * (dtype.itemsize + 4)
    products = (const.dim, const.value_dim, const.dim, const.value_dim, *([const.dim] if fused else []))
    return _estimate(const, products, const.batch * (fetched + once))


def bias(const: TileConstants, dtype: jnp.dtype) -> pl.CostEstimate:
    return _by_queries(const, dtype, products=(const.dim, const.value_dim), read=const.value_dim, written=0)


def _by_queries(const: TileConstants, dtype: jnp.dtype, products: tuple[int, ...], read: int, written: int) -> pl.CostEstimate:
    """Keys and values are fetched at every visit. ``read``, ``written``: further elements per query."""
    q, k, dims = _length(const.q), _length(const.k), const.dim + const.value_dim
    fetched = const.heads * const.q.blocks * share(const) * k * dims * dtype.itemsize
    once = const.heads * q * ((const.dim + read) * dtype.itemsize + written * 4)
    return _estimate(const, products, const.batch * (fetched + once))


def _estimate(const: TileConstants, products: tuple[int, ...], memory: float) -> pl.CostEstimate:
    """``products``: the inner or outer dims of the matrix products."""
    pairs = const.batch * const.heads * _length(const.q) * _length(const.k) * share(const)
    return pl.CostEstimate(flops=int(2 * pairs * sum(products)), transcendentals=int(pairs), bytes_accessed=int(memory))


def _length(layout: BlockLayout) -> int:
    return layout.runs * layout.length


def share(const: TileConstants) -> float:
    """The share of pairs that the static mask leaves visible, averaged over the ring: only the device knows which shards it has."""
    mask, keys = const.scores.mask, _length(const.k)
    before = _least(mask.left, mask.chunk and mask.chunk // 2)
    after = 0 if mask.causal else mask.right
    whole = 0.5 if mask.causal else 1.0
    return whole if before is None or after is None else min(whole, (before + after + 1) / keys)


def _least(*sides: int | None) -> int | None:
    return min((side for side in sides if side is not None), default=None)
