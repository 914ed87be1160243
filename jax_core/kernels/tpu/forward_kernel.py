"""The forward kernel: online softmax over the key blocks on the list, after FlashAttention (Dao et al. 2022, arXiv:2205.14135)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_core.kernels.tpu.plan import FIRST, LAST, Plan, visit, when_it_runs
from jax_core.kernels.tpu.scores import At, column, dropped, make_tile, product

LOWEST = float(jnp.finfo(jnp.float32).min)


class State(NamedTuple):
    """The online softmax of a block of queries, in fast memory: columns ``[q, 1]``, and the numerator ``[q, value_dim]``."""

    maximum: Any
    denominator: Any
    numerator: Any


def forward_kernel(plan: Plan, size: tuple[int, int], words, numbers, shards, beside, before, out, lse, *scratch):
    """``before``: the partial result so far, or None. ``size``: of the visits' list."""
    batch, head, number = (pl.program_id(axis) for axis in range(3))
    q, k, flags = visit(plan, size, words, batch, number)
    at, state = At(batch, head, q, k, numbers), State(*scratch)

    @pl.when(flags & FIRST != 0)
    def start():
        _start(state, before)

    when_it_runs(flags, lambda masked: _update(plan, at, state, shards, beside, masked))

    @pl.when(flags & LAST != 0)
    def finish():
        _finish(state, out, lse)


def _start(state: State, before) -> None:
    if before is None:
        state.maximum[...] = jnp.full_like(state.maximum, LOWEST)
        state.denominator[...] = jnp.zeros_like(state.denominator)
        state.numerator[...] = jnp.zeros_like(state.numerator)
        return
    out, lse = before
    # A partial is normalised: its denominator is 1 at the maximum `lse`, and 0 where it saw no key.
    maximum = column(lse[...])
    state.maximum[...] = jnp.maximum(maximum, LOWEST)
    state.denominator[...] = jnp.where(maximum == -jnp.inf, 0.0, 1.0)
    state.numerator[...] = out[...]


def _update(plan: Plan, at: At, state: State, shards, beside, masked: bool) -> None:
    tile = make_tile(plan, at, shards.q[...], shards.k[...], beside, masked, turned=False)
    before = state.maximum[...]
    maximum = jnp.maximum(before, tile.logits.max(1, keepdims=True))
    weights, decay = jnp.exp(tile.logits - maximum), jnp.exp(before - maximum)
    state.maximum[...] = maximum
    state.denominator[...] = state.denominator[...] * decay + weights.sum(1, keepdims=True)
    value = shards.v[...]
    share = product(dropped(plan, tile, weights).astype(value.dtype), value, (1, 0), plan)
    state.numerator[...] = state.numerator[...] * decay + share


def _finish(state: State, out, lse) -> None:
    some = state.denominator[...] > 0
    denominator = jnp.where(some, state.denominator[...], 1.0)
    out[...] = (state.numerator[...] / denominator).astype(out.dtype)
    found = jnp.where(some, state.maximum[...] + jnp.log(denominator), -jnp.inf)
    lse[...] = row(found)


def row(x):
    """``[n, 1] -> [1, n]``"""
    return jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]
