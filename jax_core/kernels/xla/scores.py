"""How the XLA kernel computes scores, shared by the forward and the backward.

Names of dimensions in comments: n/m query and key blocks, b batch, h key/value heads, g query heads of a group, q and k positions
in a block, d dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_core.kernels.blocks import distance as block_distance
from jax_core.kernels.blocks import scaled
from jax_core.kernels.contract import Scores, accumulation_dtype
from jax_core.kernels.xla.blocks import BlockPositions, Keys, Queries, Tiles, Uncut
from jax_core.masks.dropout import keep_mask
from jax_core.masks.functions import Predicate
from jax_core.masks.static import visible
from jax_core.varying import vary, varying_axes


def logits(scores: Scores, uncut: Uncut, query: Queries, key: Keys, tile: Tiles) -> tuple[Array, Array | None]:
    """The block's logits, ``-inf`` where a mask hides them, and the soft cap's tanh (or None)."""
    x = product("bhgqd,bhkd->bhgqk", query.q, key.k, scores)
    if scores.logits_dtype is not None:
        x = x.astype(scores.logits_dtype).astype(x.dtype)
    x, tanh = scaled(scores, x)
    if tile.bias is not None:
        x = x + tile.bias.astype(x.dtype)
    if uncut.slopes is not None:
        x = x - uncut.slopes.astype(x.dtype) * distance(scores, query, key, x.dtype)
    return jnp.where(_visible(scores, uncut, query.at, key.at, tile), x, -jnp.inf), tanh


def _visible(scores: Scores, uncut: Uncut, q: BlockPositions, k: BlockPositions, tile: Tiles) -> Array:
    """Broadcasts to ``[b, h, g, q, k]``."""
    seen = visible(scores.mask, _over_queries(q.position), _over_keys(k.position))
    if q.segment is not None and k.segment is not None:
        q_segment, k_segment = _over_queries(q.segment), _over_keys(k.segment)
        seen = seen & (q_segment == k_segment) & (q_segment >= 0)
    if k.real is not None:
        seen = seen & k.real
    if tile.mask is not None:
        seen = seen & tile.mask
    for predicate, arrays in zip(scores.predicates, uncut.predicate_arrays, strict=True):
        seen = seen & _evaluate(predicate, arrays, uncut, q, k)
    return seen


def _evaluate(
    predicate: Predicate, arrays: tuple[Array | np.ndarray, ...], uncut: Uncut, q: BlockPositions, k: BlockPositions
) -> Array:
    """The predicate for every element, vmapped over keys, queries, the two head dimensions and the batch."""
    q_at, k_at = (q.position, k.position) if predicate.over == "position" else (q.place[None], k.place[None])
    count = uncut.batch.shape[0]
    q_at, k_at = (jnp.broadcast_to(at, (count, at.shape[-1])) for at in (q_at, k_at))
    arguments = vary((uncut.batch, uncut.head, q_at, k_at), varying_axes(uncut, q, k))
    function = partial(predicate.apply, arrays)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (None, 0, None, None), (0, None, 0, 0)):
        function = jax.vmap(function, axes)
    return function(*arguments)


def dropout_factor(scores: Scores, uncut: Uncut, query: Queries, key: Keys, dtype: DTypeLike) -> Array:
    if not scores.dropout_prob:
        return jnp.ones((), dtype)
    keep = keep_mask(
        uncut.seed,
        uncut.batch[:, None, None, None, None],
        uncut.head[None, :, :, None, None],
        query.at.place[:, None],
        key.at.place[None, :],
        scores.dropout_prob,
    )
    return keep.astype(dtype) / (1 - scores.dropout_prob)


def distance(scores: Scores, query: Queries, key: Keys, dtype: DTypeLike) -> Array:
    """``|q - k|`` of positions."""
    return block_distance(scores.mask, _over_queries(query.at.position), _over_keys(key.at.position), dtype)


def _over_queries(x: Array) -> Array:
    """``[b|1, q] -> [b|1, 1, 1, q, 1]``"""
    return x[:, None, None, :, None]


def _over_keys(x: Array) -> Array:
    """``[b|1, k] -> [b|1, 1, 1, 1, k]``"""
    return x[:, None, None, None, :]


def product(formula: str, a: Array, b: Array, scores: Scores) -> Array:
    """A matrix product in the accumulation dtype."""
    dtype = accumulation_dtype(b.dtype)
    precision = scores.precision or lax.Precision.HIGHEST
    return jnp.einsum(formula, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=dtype)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the dimensions that are 1 in ``shape``."""
    return x.sum([i for i, length in enumerate(shape) if length == 1 and x.shape[i] != 1], keepdims=True)
