"""The oracle: attention as the textbook writes it, dense, on one device, differentiated by plain JAX.

Every backend and every ring is measured against this file, so it shares no code with them: masks, positions, sinks and
softmax are written out here once more, from the documentation and not from the implementation. The one thing taken from
elsewhere is the dropout pattern, which is a definition and not a result. Run it in float64 (``jax.enable_x64(True)``).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_core.masks.dropout import keep_mask

_Array = np.ndarray | jax.Array  # or a tracer, which passes for the latter


class _Sliced(Protocol):
    def __getitem__(self, where: tuple[slice, slice], /) -> _Array: ...


class ReferenceOutput(NamedTuple):
    """``out`` [batch, queries, heads, value dim]; ``lse`` [batch, heads, queries], natural log, -inf where nothing is seen."""

    out: jax.Array
    lse: jax.Array


class _Options(TypedDict, total=False):
    softmax_aux: _Array | None
    bias: _Array | None
    mask: _Array | None
    mask_mod: Callable[..., jax.Array] | None
    mask_builder: Callable[..., _Sliced] | None
    q_segment_ids: _Array | None
    kv_segment_ids: _Array | None
    q_position_ids: _Array | None
    kv_position_ids: _Array | None
    sliding_window: int | tuple[int | None, int | None] | None
    chunk_size: int | None
    causal: bool
    logits_soft_cap: float | None
    softmax_scale: float | None
    alibi_slopes: _Array | None
    dropout_prob: float
    dropout_seed: _Array | None


class _Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    groups: int  # query heads that share one K/V head


def reference_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    softmax_aux: _Array | None = None,
    bias: _Array | None = None,
    *,
    mask: _Array | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
    mask_builder: Callable[..., _Sliced] | None = None,
    q_segment_ids: _Array | None = None,
    kv_segment_ids: _Array | None = None,
    q_position_ids: _Array | None = None,
    kv_position_ids: _Array | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    alibi_slopes: _Array | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: _Array | None = None,
    dtype: DTypeLike | None = None,
) -> ReferenceOutput:
    """Attention of whole sequences in natural order; the arguments mean what they mean to ``jax_core.ring_attention``.

    query [B, T, H, D]; key [B, S, Hkv, D]; value [B, S, Hkv, Dv]; softmax_aux [H] (one sink per head), [n] with n != H
    (sinks shared by the heads) or [H, n]; bias and mask [B|1, H|1, T, S]; segment ids [B, T] and [B, S] (negative: padding);
    position ids [B, T] or [T]; alibi_slopes [H] or [B, H]; dropout_seed uint32[2].
    Everything is computed in ``dtype`` and both results come back in it: float64 when x64 is on, otherwise float32.
    A row that sees no key gives out 0, lse -inf (or the logsumexp of its sinks) and gradients 0. The cotangents of padded rows, of
    out and of lse, count for nothing: a loss may leave anything there.

    Raises ValueError for float64 without x64 and for ids given on one side only when the lengths differ.
    """
    number = _number(dtype)
    query, key, value = (jnp.asarray(array, number) for array in (query, key, value))
    sizes = _Sizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1], query.shape[2] // key.shape[2])
    key, value = (jnp.repeat(array, sizes.groups, axis=2) for array in (key, value))
    q_pos, k_pos = _positions(q_position_ids, kv_position_ids, sizes)
    logits = _logits(query, key, softmax_scale, logits_soft_cap)
    if bias is not None:
        logits = logits + jnp.asarray(bias, number)
    if alibi_slopes is not None:
        slopes = jnp.broadcast_to(jnp.asarray(alibi_slopes, number), (sizes.batch, sizes.heads))
        logits = logits - slopes[:, :, None, None] * jnp.abs(q_pos[:, :, None] - k_pos[:, None, :])[:, None]
    seen = _visible_by_position(q_pos, k_pos, causal, sliding_window, chunk_size)[:, None]
    seen = seen & _visible_by_segment(q_segment_ids, kv_segment_ids, sizes)
    seen = seen & _visible_by_mask(mask, mask_mod, mask_builder, q_pos, k_pos, sizes)
    keep = _keep(dropout_prob, dropout_seed, sizes)
    result = _softmax_average(logits, seen, _sinks(softmax_aux, sizes.heads, number), keep, value)
    return _without_cotangents_of_padding(result, q_segment_ids, kv_segment_ids, sizes)


def reference_gradients(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, dout: np.ndarray, **options: Unpack[_Options]
) -> list[np.ndarray]:
    """``out`` and the gradients of query, key and value for its cotangent ``dout``, in float64; ``options`` as for
    :func:`reference_attention`."""

    @jax.jit
    def run(operands: tuple[_Array, ...], dout: _Array) -> list[_Array]:
        out, transpose = jax.vjp(lambda *qkv: reference_attention(*qkv, **options, dtype="float64").out, *operands)
        return [out, *transpose(dout)]

    with jax.enable_x64(True):
        return [np.array(x) for x in run((query, key, value), dout)]


def _number(dtype: DTypeLike | None) -> jnp.dtype:
    widest = jnp.zeros(0, float).dtype  # float64 exactly when x64 is on
    number = jnp.dtype(dtype or widest)
    if number == jnp.float64 and widest != jnp.float64:
        raise ValueError("the float64 reference needs x64; call it inside `with jax.enable_x64(True):`")
    return number


def _positions(q_ids: _Array | None, kv_ids: _Array | None, sizes: _Sizes) -> tuple[jax.Array, jax.Array]:
    """[B, T] and [B, S]: the ids if given, otherwise 0, 1, 2, ..."""
    if q_ids is None and kv_ids is None:
        q_ids, kv_ids = jnp.arange(sizes.queries), jnp.arange(sizes.keys)
    q_ids, kv_ids = _broadcast_ids(q_ids, kv_ids, sizes, "position")
    return (
        jnp.broadcast_to(jnp.asarray(q_ids, int), (sizes.batch, sizes.queries)),  # int64 with x64: distances take 33 bits
        jnp.broadcast_to(jnp.asarray(kv_ids, int), (sizes.batch, sizes.keys)),
    )


def _broadcast_ids(q_ids: _Array | None, kv_ids: _Array | None, sizes: _Sizes, name: str) -> tuple[_Array, _Array]:
    if (q_ids is None or kv_ids is None) and sizes.queries != sizes.keys:
        raise ValueError(
            f"{name} ids of one side serve both only when the lengths are equal; got {sizes.queries} queries and {sizes.keys} keys"
        )
    both = kv_ids if q_ids is None else q_ids, q_ids if kv_ids is None else kv_ids
    assert both[0] is not None and both[1] is not None
    return both[0], both[1]


def _logits(query: jax.Array, key: jax.Array, scale: float | None, cap: float | None) -> jax.Array:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", query, key, precision=jax.lax.Precision.HIGHEST)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _without_cotangents_of_padding(
    result: ReferenceOutput, q_ids: _Array | None, kv_ids: _Array | None, sizes: _Sizes
) -> ReferenceOutput:
    if q_ids is None and kv_ids is None:
        return result
    real = jnp.broadcast_to(jnp.asarray(_broadcast_ids(q_ids, kv_ids, sizes, "segment")[0]), (sizes.batch, sizes.queries)) >= 0
    lse = jnp.where(real[:, None], result.lse, jax.lax.stop_gradient(result.lse))
    return ReferenceOutput(jnp.where(real[..., None, None], result.out, jax.lax.stop_gradient(result.out)), lse)


def _visible_by_position(
    q_pos: jax.Array, k_pos: jax.Array, causal: bool, window: int | tuple[int | None, int | None] | None, chunk: int | None
) -> jax.Array:
    """[B, T, S]. Chunked attention is causal; an int window is the same on both sides; -1 means no bound."""
    behind = q_pos[:, :, None] - k_pos[:, None, :]  # how far the key lies behind the query
    sides = (window, window) if window is None or isinstance(window, int) else window
    left, right = (None if side is not None and side > 2**31 - 1 else side for side in sides)  # further than int32 reaches
    seen = jnp.ones(behind.shape, bool)
    if causal or chunk is not None:
        seen &= behind >= 0
    if left is not None and left != -1:
        seen &= behind <= left
    if right is not None and right != -1:
        seen &= -behind <= right
    if chunk is not None:
        seen &= (q_pos // chunk)[:, :, None] == (k_pos // chunk)[:, None, :]
    return seen


def _visible_by_segment(q_ids: _Array | None, kv_ids: _Array | None, sizes: _Sizes) -> jax.Array:
    """[B, 1, T, S]: ids equal, and neither negative."""
    if q_ids is None and kv_ids is None:
        return jnp.ones((1, 1, 1, 1), bool)
    q_ids, kv_ids = (jnp.asarray(ids) for ids in _broadcast_ids(q_ids, kv_ids, sizes, "segment"))
    same = q_ids[:, :, None] == kv_ids[:, None, :]
    return (same & (q_ids >= 0)[:, :, None] & (kv_ids >= 0)[:, None, :])[:, None]


def _visible_by_mask(
    mask: _Array | None,
    mask_mod: Callable[..., jax.Array] | None,
    mask_builder: Callable[..., _Sliced] | None,
    q_pos: jax.Array,
    k_pos: jax.Array,
    sizes: _Sizes,
) -> jax.Array:
    """Broadcasts to [B, H, T, S]: what all of the user's masks allow."""
    seen = jnp.ones((1, 1, 1, 1), bool)
    if mask is not None:
        seen = seen & jnp.asarray(mask, bool)
    if mask_mod is not None:
        seen = seen & _call_mask_mod(mask_mod, q_pos, k_pos, sizes)
    if mask_builder is not None:
        seen = seen & _call_mask_builder(mask_builder, sizes)
    return seen


def _call_mask_mod(mask_mod: Callable[..., jax.Array], q_pos: jax.Array, k_pos: jax.Array, sizes: _Sizes) -> jax.Array:
    over_keys = jax.vmap(mask_mod, (None, None, None, 0))
    over_queries = jax.vmap(over_keys, (None, None, 0, None))
    over_heads = jax.vmap(over_queries, (None, 0, None, None))
    over_batch = jax.vmap(over_heads, (0, None, 0, 0))
    return over_batch(jnp.arange(sizes.batch), jnp.arange(sizes.heads), q_pos, k_pos)


def _call_mask_builder(mask_builder: Callable[..., _Sliced], sizes: _Sizes) -> jax.Array:
    per_head = [
        np.asarray(mask_builder(sizes.queries, sizes.keys, sizes.heads, head, sizes.groups)[: sizes.queries, : sizes.keys])
        for head in range(sizes.heads)
    ]
    return jnp.asarray(np.stack(per_head), bool)[None]


def _keep(prob: float, seed: _Array | None, sizes: _Sizes) -> jax.Array | None:
    """[B, H, T, S]: 1/(1 - prob) where an attention weight is kept, 0 where it is dropped; None without dropout."""
    if prob == 0.0:
        return None
    batch, head, q_index, k_index = jnp.ogrid[: sizes.batch, : sizes.heads, : sizes.queries, : sizes.keys]
    return keep_mask(seed, batch, head, q_index, k_index, prob) / (1.0 - prob)


def _sinks(softmax_aux: _Array | None, heads: int, number: jnp.dtype) -> jax.Array:
    """[H, n]; n is 0 without sinks."""
    if softmax_aux is None:
        return jnp.zeros((heads, 0), number)
    sinks = jnp.asarray(softmax_aux, number)
    if sinks.ndim == 2:
        return sinks
    return sinks[:, None] if sinks.shape[0] == heads else jnp.broadcast_to(sinks, (heads, sinks.shape[0]))


def _softmax_average(
    logits: jax.Array, seen: jax.Array, sinks: jax.Array, keep: jax.Array | None, value: jax.Array
) -> ReferenceOutput:
    """Softmax over the seen keys and the sinks, then the average of the values.

    Both branches of each ``where`` stay finite, so a row that sees nothing has zero gradients and not NaN.
    """
    seen = jnp.broadcast_to(seen, logits.shape) & (logits > -jnp.inf)
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, initial=-jnp.inf)
    top = jnp.maximum(top, jnp.max(sinks, axis=-1, initial=-jnp.inf)[None, :, None])
    top = jax.lax.stop_gradient(jnp.where(top > -jnp.inf, top, 0.0))  # any constant gives the same result
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top[..., None], 0.0)), 0.0)
    total = weight.sum(-1) + jnp.exp(sinks[None, :, None, :] - top[..., None]).sum(-1)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    dropped = weight if keep is None else weight * keep.astype(weight.dtype)
    attention = dropped / total[..., None]
    out = jnp.einsum("bhqk,bkhd->bqhd", attention, value, precision=jax.lax.Precision.HIGHEST)
    return ReferenceOutput(out, jnp.where(some, top + jnp.log(total), -jnp.inf))
