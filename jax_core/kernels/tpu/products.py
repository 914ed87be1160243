"""Matrix products and logits inside TPU kernels."""

import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import Scores


def product(a: Array, b: Array, axes: tuple[int, int], scores: Scores) -> Array:
    """A matrix product that sums axis ``axes[0]`` of ``a`` and ``axes[1]`` of ``b``, in float32. Float32 inputs are multiplied in
    full precision unless the scores ask for less; 16-bit inputs as the matrix unit does by default."""
    precision = scores.precision
    if precision is None and a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def scaled(scores: Scores, x: Array) -> tuple[Array, Array | None]:
    """The logits from the products ``x = q . k``, scaled and soft-capped, and the soft cap's tanh (or None) for the gradient."""
    x, tanh = x * scores.scale, None
    if scores.softcap is not None:
        tanh = jnp.tanh(x / scores.softcap)
        x = tanh * scores.softcap
    return x, tanh


def through_softcap(gradient: Array, tanh: Array | None) -> Array:
    """The gradient of the soft cap's input, from that of its output."""
    return gradient if tanh is None else gradient * (1 - tanh * tanh)


def column(row: Array) -> Array:
    """``[1, n] -> [n, 1]``"""
    return jnp.expand_dims(row[0], -1)


def row(column: Array) -> Array:
    """``[n, 1] -> [1, n]``"""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]
