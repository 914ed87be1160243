"""Padding may hold anything, including NaN and infinities: the strategies clear it once per pass, before the first step.

Masks make the logits of padding ``-inf`` and so its weights 0, but a kernel multiplies those zeros by the padding's contents
(values in the forward; queries, keys and cotangents in the backward), and ``0 * NaN`` is NaN. Clearing them costs one elementwise
pass, which XLA fuses with the code that makes or packs them, and only if a call has documents that may not cover all rows, or a
boolean mask. A select in
every product of every kernel would cost something at each step.
"""

import jax.numpy as jnp
from jax import Array

from jax_core.operands import Operands
from jax_core.strategies.pairs.rows import Real


def clear_values(operands: Operands, real: Real) -> Operands:
    """For the forward: sets the values of padding to 0. (Padding's queries and keys only reach logits that are masked.)"""
    return operands._replace(value=_cleared(operands.value, real.keys))


def clear_operands(operands: Operands, real: Real) -> Operands:
    """For the backward: sets the queries, keys and values of padding to 0."""
    query, key = _cleared(operands.query, real.queries), _cleared(operands.key, real.keys)
    return clear_values(operands, real)._replace(query=query, key=key)


def clear_cotangents(real: Real, dout: Array, dlse: Array | None) -> tuple[Array, Array | None]:
    """``dout [batch, q_length, heads, value_dim]`` and ``dlse [batch, heads, q_length]`` (or None), with 0 in padding rows."""
    if dlse is not None:
        dlse = jnp.swapaxes(_cleared(jnp.swapaxes(dlse, 1, 2), real.queries), 1, 2)
    return _cleared(dout, real.queries), dlse


def clear_hidden(x: Array, mask: Array | None) -> Array:
    """Keys or values ``x [batch, k_length, kv_heads, dim]``, with 0 where ``mask`` (bool ``[batch|1, heads|1, rows|1, k_length]``,
    or None) hides the key from every query of the shard in every head of its group."""
    if mask is None:
        return x
    seen = mask.any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], x.shape[2], -1, seen.shape[2]).any(2)
    return jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], x, jnp.zeros((), x.dtype))


def _cleared(x: Array, real: Array | None) -> Array:
    """``x [batch, length, ...]`` with 0 in the rows that are not ``real``, ``[batch|1, length]``."""
    if real is None:
        return x
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
