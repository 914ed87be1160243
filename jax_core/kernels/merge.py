"""Partial results and attention sinks, merged by online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

A sink is a logit without a value: it joins the softmax's denominator once, after the last step of the ring. Its gradient needs only
the rows' final ``lse`` and ``delta``.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import Partial


def join(partials: Sequence[Partial], out_dtype: DTypeLike) -> Partial:
    """Any number of partials as one. Where ``lse`` is -inf, ``out`` is ignored and may hold anything, even NaN.

    Elementwise in ``out``, so that XLA makes it one pass over memory.
    """
    lse = reduce(jnp.logaddexp, (partial.lse for partial in partials))
    finite = jnp.where(jnp.isneginf(lse), 0, lse)
    weights = [jnp.swapaxes(jnp.exp(partial.lse - finite), 1, 2)[..., None] for partial in partials]
    terms = (jnp.where(weight == 0, 0, weight * partial.out) for weight, partial in zip(weights, partials, strict=True))
    return Partial(reduce(jnp.add, terms).astype(out_dtype), lse)


def join_stacked(partials: Partial, out_dtype: DTypeLike) -> Partial:
    """As :func:`join`, of partials that lie along a leading dimension of ``out`` and ``lse``."""
    lse = _logsumexp(partials.lse, axis=0)
    weight = jnp.swapaxes(jnp.exp(partials.lse - jnp.where(jnp.isneginf(lse), 0, lse)), 2, 3)[..., None]
    return Partial(jnp.where(weight == 0, 0, weight * partials.out).sum(0).astype(out_dtype), lse)


def join_sinks(partial: Partial, sinks: Array) -> Partial:
    """``sinks``: ``[heads, n]`` logits. A row that saw no key keeps ``out`` 0 and gets the sinks' LSE."""
    lse_sinks = _logsumexp(sinks.astype(partial.lse.dtype), axis=-1)
    lse = jnp.logaddexp(partial.lse, lse_sinks[None, :, None])
    share = jnp.exp(partial.lse - jnp.where(jnp.isneginf(lse), 0, lse))
    return Partial(partial.out * jnp.swapaxes(share, 1, 2)[..., None], lse)


def _logsumexp(x: Array, axis: int) -> Array:
    """Its derivative is 0 where all of ``x`` is -inf; that of ``jax.nn.logsumexp`` is NaN."""
    none = jnp.isneginf(x).all(axis, keepdims=True)
    return jnp.where(none.squeeze(axis), -jnp.inf, jax.nn.logsumexp(jnp.where(none, 0, x), axis))


def sink_gradient(sinks: Array, lse: Array, delta: Array) -> Array:
    """The gradient of ``sinks [heads, n]``: ``-sum_rows exp(sink - lse) * delta``, from ``lse``/``delta [batch, heads, length]``.

    A sink's weight multiplies a zero value, so the ``dout . v`` term of an ordinary logit's gradient is 0.
    """
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    weight = jnp.exp(sinks.astype(lse.dtype)[None, :, :, None] - lse[:, :, None, :])
    return -jnp.sum(weight * delta[:, :, None, :], axis=(0, 3))


def sinks_per_head(softmax_aux: Array, heads: int) -> Array:
    """``[heads]`` is one sink per head, any other 1-D length is sinks shared by all heads; the result is ``[heads, n]``."""
    if softmax_aux.ndim == 2:
        return softmax_aux
    if softmax_aux.shape[0] == heads:
        return softmax_aux[:, None]
    return jnp.broadcast_to(softmax_aux, (heads, softmax_aux.shape[0]))
