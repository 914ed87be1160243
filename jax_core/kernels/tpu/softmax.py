"""The online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) of a block of queries, tile by tile, inside a kernel.

It handles tiles in either orientation: the queries' statistics are a column if tiles are queries x keys, and a row if they are keys
x queries. ``axis`` is the keys' axis of a tile.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, Ref

LOWEST = float(jnp.finfo(jnp.float32).min)  # instead of -inf, since -inf - -inf is NaN


class SoftmaxState(NamedTuple):
    """References into VMEM, float32. ``maximum``, ``denominator``: ``[q, 1]`` or ``[1, q]``; ``numerator``: ``[q, value_dim]`` or
    ``[value_dim, q]``."""

    maximum: Ref
    denominator: Ref
    numerator: Ref


def start(state: SoftmaxState) -> None:
    state.maximum[...] = jnp.full_like(state.maximum, LOWEST)
    state.denominator[...] = jnp.zeros_like(state.denominator)
    state.numerator[...] = jnp.zeros_like(state.numerator)


def resume(state: SoftmaxState, out: Ref, lse: Array) -> None:
    """Continues from a partial result: the reference ``out``, and ``lse`` in the orientation of the state. A partial is normalised:
    its maximum is ``lse`` and its denominator 1, or 0 where no key was seen."""
    state.maximum[...] = jnp.maximum(lse, LOWEST)
    state.denominator[...] = jnp.where(lse == -jnp.inf, 0.0, 1.0)
    state.numerator[...] = out[...]


def update(state: SoftmaxState, logits: Array, axis: int, weigh: Callable[[Array], Array]) -> None:
    """Adds a tile. ``weigh`` maps its weights to the weighted sum of its values."""
    before = state.maximum[...]
    maximum = jnp.maximum(before, logits.max(axis, keepdims=True))
    weights, decay = jnp.exp(logits - maximum), jnp.exp(before - maximum)
    state.maximum[...] = maximum
    state.denominator[...] = state.denominator[...] * decay + weights.sum(axis, keepdims=True)
    share = weigh(weights)
    state.numerator[...] = state.numerator[...] * decay + share


def finish(state: SoftmaxState, out: Ref, lse: Ref, as_stored: Callable[[Array], Array] = lambda x: x) -> None:
    """Writes the normalised result, and its LSE in the shape that ``as_stored`` gives it. Without a key: 0, and LSE ``-inf``."""
    some = state.denominator[...] > 0
    denominator = jnp.where(some, state.denominator[...], 1.0)
    out[...] = (state.numerator[...] / denominator).astype(out.dtype)
    lse[...] = as_stored(jnp.where(some, state.maximum[...] + jnp.log(denominator), -jnp.inf))
