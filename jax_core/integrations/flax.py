"""Ring attention as the ``attention_fn`` of flax's layers, linen's and nnx's. Importing this module does not import flax."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import Precision
from jax.typing import ArrayLike, DTypeLike

from jax_core.integrations.settings import Arrays, Dropout, RingSettings

_NO_WEIGHTS = (
    "attention weights cannot be sown: no device of a ring ever has them, and this attention never computes them as a whole; "
    "call the layer without sow_weights"
)
_ONE_PATTERN = (
    "broadcast_dropout=True, flax's default, gives one pattern of dropped weights to all batch entries and heads; this attention "
    "draws one for each. Say so where the layer is made, with broadcast_dropout=False"
)
_NO_CACHE = (
    "one query beside {} keys is flax's decode=True: a key/value cache cannot be used on a ring, whose devices share the queries "
    "too. Decode with the layer's own attention_fn on one device (the parameters are the same), or with RingAttentionFn() without "
    "mesh and axis_name"
)


@dataclass(frozen=True, kw_only=True)
class RingAttentionFn(RingSettings):
    """An ``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``.

    ``RingAttentionFn(mesh=mesh, axis_name="sp", causal=True)`` for layers whose arrays are whole (under ``jax.jit``, sharded over
    the mesh), ``RingAttentionFn(axis_name="sp", causal=True)`` for layers inside ``shard_map``, whose arrays are shards. The other
    settings are those of :func:`jax_core.ring_attention`. A mask that is a rule (causal, a window, chunks, a ``mask_mod``) belongs
    here, where it takes no memory, rather than in the layer's ``mask``. Arrays that are no part of flax's signature (segment and
    position ids, sinks, slopes) are keyword arguments of the call: ``partial(RingAttentionFn(...), q_segment_ids=ids)``.

    Results and gradients are those of flax's ``dot_product_attention`` on whole arrays, with two exceptions: a query that sees
    no key gets 0 (flax: the mean of all values), and dropout drops other weights (below).
    """

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Precision | str | None = None,
        module: object = None,
        *,
        is_causal: bool = False,
        promote_dtype: Callable[..., Iterable[Array]] | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
        **arrays: Unpack[Arrays],
    ) -> Array:
        """The attention of ``query [batch..., q_length, heads, dim]``, ``key`` and ``value [batch..., k_length, kv_heads, dim]``.

        Args:
            bias, mask: broadcast to ``[batch..., heads, q_length, keys of the whole sequence]``, rows in the layout's order; the
                mask is True or nonzero where a query may attend.
            dropout_rng, dropout_rate, deterministic: the pattern follows from the key, batch, head and the places of query and key
                in the sequence: it is the same for any ring and layout, and not the one that flax draws from this key. Inside
                ``shard_map`` the key must be the same on all devices of a ring. ``broadcast_dropout`` must be False.
            dtype, promote_dtype: of the computation, as in flax. force_fp32_for_softmax: the softmax is always in float32 or wider;
                True returns float32, as linen does.
            precision: of the matrix products; None is the settings', and without that the highest.
            is_causal: adds to the settings' ``causal``.
            arrays: ``q_segment_ids``, ``kv_segment_ids``, ``q_position_ids``, ``kv_position_ids``, ``softmax_aux``,
                ``alibi_slopes`` of :func:`jax_core.ring_attention`, for arrays with one batch dim.

        Raises:
            NotImplementedError: weights are to be sown (``module``), a product or einsum is replaced, or a cache is used on a ring.
            ValueError: ``broadcast_dropout=True`` where something is dropped, no ``dropout_rng`` for it, shapes that do not fit.
        """
        _refuse(module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
        query, key, value = _promoted((query, key, value), dtype, promote_dtype)
        lead = _batch(query, key, value)
        if self.sharded and query.shape[-3] == 1 < key.shape[-3]:
            raise NotImplementedError(_NO_CACHE.format(key.shape[-3]))
        dropout: Dropout = {} if deterministic or not dropout_rate else _dropout(dropout_rng, dropout_rate, broadcast_dropout)
        out = self.attend(
            *(x.reshape(prod(lead), *x.shape[-3:]) for x in (query, key, value)),
            bias=_rows(bias, lead),
            mask=None if mask is None else _rows(jnp.asarray(mask) != 0, lead),
            causal=self.causal or is_causal,
            precision=self.precision if precision is None else precision,
            **dropout,
            **arrays,
        )
        out = out.reshape(*lead, *out.shape[1:])
        return out.astype(jnp.promote_types(out.dtype, jnp.float32)) if force_fp32_for_softmax else out


def _refuse(module: object, *products: object) -> None:
    if module is not None:
        raise NotImplementedError(_NO_WEIGHTS)
    if any(product is not None for product in products):
        raise NotImplementedError(
            "einsum_dot_general, qk_attn_weights_einsum and attn_weights_value_einsum replace products that this attention makes "
            "in its own kernels, block by block; leave them out"
        )


def _promoted(
    qkv: tuple[Array, ...], dtype: DTypeLike | None, promote_dtype: Callable[..., Iterable[Array]] | None
) -> tuple[Array, ...]:
    if promote_dtype is not None:
        return tuple(promote_dtype(qkv, dtype=dtype))
    common = jnp.result_type(*qkv) if dtype is None else dtype
    return tuple(jnp.asarray(x, common) for x in qkv)


def _batch(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    """The dims before length, heads and head dim, which flax lets be any number."""
    lead = query.shape[:-3]
    if any(x.ndim < 3 or x.shape[:-3] != lead for x in (query, key, value)):
        shapes = ", ".join(str(x.shape) for x in (query, key, value))
        raise ValueError(f"query, key and value must be [batch..., length, heads, dim] with the same batch dims, got {shapes}")
    return lead


def _rows(x: ArrayLike | None, lead: tuple[int, ...]) -> Array | None:
    """A bias or mask with one batch dim in place of ``lead``, not expanded where it is the same for all."""
    if x is None:
        return None
    x = jnp.asarray(x)
    shape = x.shape[:-3]
    if prod(shape) == 1:
        return x.reshape(x.shape[-3:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(prod(lead), *x.shape[-3:])


def _dropout(rng: Array | None, rate: float, broadcast: bool) -> Dropout:
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs a dropout_rng, or deterministic=True")
    if broadcast:
        raise ValueError(_ONE_PATTERN)
    return {"dropout_prob": rate, "dropout_seed": jax.random.bits(rng, (2,), jnp.uint32)}
