"""Brings operands into the shapes that strategies work with, and gradients back into the operands' original shapes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import accumulation_dtype
from jax_core.kernels.merge import sinks_per_head
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec


class SmallOperands(NamedTuple):
    """The differentiable operands other than query, key and value."""

    softmax_aux: Array | None
    bias: Array | None
    alibi_slopes: Array | None


def in_full_shape(spec: RingSpec, operands: Operands) -> tuple[Operands, Callable[[SmallOperands], SmallOperands]]:
    """Sinks as ``[heads, n]``, bias and mask with 4 dimensions and all columns, ids and slopes with a batch dimension. Also returns
    a function that brings gradients back to the original shapes and dtypes."""
    reshape = partial(_reshape, spec, operands)
    inputs = SmallOperands(operands.softmax_aux, operands.bias, operands.alibi_slopes)

    def to_given_shape(gradients: SmallOperands) -> SmallOperands:
        # Sums over broadcast dimensions in the gradients' own dtype; the sums are rounded to the operand's dtype once, afterwards.
        dtype = accumulation_dtype(operands.query.dtype)
        _, transpose = jax.vjp(reshape, jax.tree.map(lambda array: array.astype(dtype), inputs))
        (summed,) = transpose(gradients)
        return jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), summed, inputs)

    small = reshape(inputs)
    full = operands._replace(
        softmax_aux=small.softmax_aux,
        bias=small.bias,
        alibi_slopes=small.alibi_slopes,
        mask=_whole_columns(spec, operands, operands.mask),
        q_segment_ids=_as_ids(operands.q_segment_ids),
        kv_segment_ids=_as_ids(operands.kv_segment_ids),
        q_position_ids=_as_ids(operands.q_position_ids),
        kv_position_ids=_as_ids(operands.kv_position_ids),
    )
    return full, to_given_shape


def _reshape(spec: RingSpec, operands: Operands, inputs: SmallOperands) -> SmallOperands:
    sinks, slopes = inputs.softmax_aux, inputs.alibi_slopes
    return SmallOperands(
        None if sinks is None else sinks_per_head(sinks, operands.query.shape[2]),
        _whole_columns(spec, operands, inputs.bias),
        None if slopes is None else jnp.atleast_2d(slopes),
    )


def _as_ids(x: Array | None) -> Array | None:
    """Signed, and wide enough for differences of positions: int32, or 64 bits unchanged."""
    return None if x is None else jnp.atleast_2d(x if x.dtype.itemsize == 8 else x.astype(jnp.int32))


def _whole_columns(spec: RingSpec, operands: Operands, x: Array | None) -> Array | None:
    """``[batch|1, heads|1, rows|1, columns]``: strategies slice the columns; the other dimensions may stay broadcast."""
    if x is None:
        return None
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*x.shape[:3], operands.key.shape[1] * spec.problem.size))
