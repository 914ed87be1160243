"""The forward of a whole ring as one kernel.

At each step the halves that are here are sent on, and while they travel every query block meets them: the online softmax goes on
from the partial result in HBM, which is normalised at every step and needs no more than its LSE to be continued.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.launch import launch, pipeline
from jax_core.strategies.fused_ring.plan import TRAVELLING, Plan, Shards
from jax_core.strategies.fused_ring.rotation import (
    freight,
    freight_semaphores,
    give_credits,
    meet,
    meeting_semaphores,
    part,
    wait_credits,
)
from jax_core.strategies.fused_ring.sweep import Sweep, ends, for_each_kind, make_sweep
from jax_core.strategies.fused_ring.tiles import logits, product


def forward(plan: Plan, rank, shards: Shards, interpret) -> tuple[jax.Array, jax.Array]:
    """``(out [batch, heads, value_dim, positions], lse [batch, heads, 1, positions])``, float32, natural log, ``-inf`` where a row
    saw nothing (its ``out`` is 0)."""
    positions = 2 * plan.q.padded
    results = {
        "out": jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.value_dim, positions), jnp.float32),
        "lse": jax.ShapeDtypeStruct((plan.batch, plan.heads, 1, positions), jnp.float32),
    }
    scratch = {
        "accumulator": pltpu.VMEM((plan.value_dim, plan.q.block), jnp.float32),
        "maximum": pltpu.VMEM((1, plan.q.block), jnp.float32),
        "total": pltpu.VMEM((1, plan.q.block), jnp.float32),
        **meeting_semaphores(),
        **freight_semaphores("shards"),
    }
    found = launch(partial(_kernel, plan), plan, rank, shards._asdict(), results, scratch, products=2, interpret=interpret)
    return found["out"], found["lse"]


def _kernel(plan: Plan, rank, refs: dict[str, Any]) -> None:
    shards = freight("shards", plan, rank, refs, TRAVELLING)
    meet(plan, rank, refs["met"])

    def step_of_ring(step, _):
        moves_on = step < plan.hops

        @pl.when(step > 0)
        def _():
            shards.wait_arrived(step)

        @pl.when((step > 0) & moves_on)
        def _():
            wait_credits(plan, refs["credit"])

        @pl.when(moves_on)
        def _():
            shards.depart(step)

        _attend(plan, rank, step, refs)

        @pl.when(moves_on)
        def _():
            shards.wait_departed(step)

        @pl.when(step + 1 < plan.hops)
        def _():
            give_credits(plan, rank, refs["credit"])

        return 0

    lax.fori_loop(0, plan.hops + 1, step_of_ring, 0)
    part(refs["met"])


def _attend(plan: Plan, rank, step, refs: dict[str, Any]) -> None:
    """Every query block over the two halves that are here."""
    sweep = make_sweep(plan, rank, step, over_queries=False)
    inputs = {"query": sweep.rows(plan.dim), "key": sweep.keys(plan.dim), "value": sweep.keys(plan.value_dim), **sweep.segments()}
    carry = {"out": sweep.columns(plan.value_dim), "lse": sweep.columns(1)}
    pipeline(partial(_tile_kernel, sweep, step, refs), sweep.grid, inputs, carry, refs)


def _tile_kernel(sweep: Sweep, step, refs, blocks: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    state = refs["accumulator"], refs["maximum"], refs["total"]
    first, last = ends()

    @pl.when(first & (step == 0))
    def _():
        _begin(*state)

    @pl.when(first & (step > 0))
    def _():
        _continue(*state, before["out"][...], before["lse"][...])

    for_each_kind(sweep, blocks, lambda hidden_by: _add_tile(sweep.plan, blocks, hidden_by, *state))

    @pl.when(last)
    def _():
        after["out"][...], after["lse"][...] = _normalised(*state)


def _begin(accumulator, maximum, total) -> None:
    accumulator[...] = jnp.zeros_like(accumulator)
    maximum[...] = jnp.full_like(maximum, -jnp.inf)
    total[...] = jnp.zeros_like(total)


def _continue(accumulator, maximum, total, out, lse) -> None:
    """A normalised partial result is one whose maximum is its LSE and whose weights sum to 1, or 0 where nothing was seen."""
    accumulator[...] = out
    maximum[...] = lse
    total[...] = jnp.where(lse == -jnp.inf, 0.0, 1.0)


def _add_tile(plan: Plan, blocks, hidden_by, accumulator, maximum, total) -> None:
    """Milakov and Gimelshein 2018, arXiv:1805.02867: the online softmax."""
    x, _ = logits(plan.scores, blocks["query"][...], blocks["key"][...], hidden_by)
    highest = jnp.maximum(maximum[...], jnp.max(x, axis=0, keepdims=True))
    finite = jnp.where(highest == -jnp.inf, 0.0, highest)
    rescale, weights = jnp.exp(maximum[...] - finite), jnp.exp(x - finite)
    maximum[...] = highest
    total[...] = total[...] * rescale + jnp.sum(weights, axis=0, keepdims=True)
    value = blocks["value"][...]
    accumulator[...] = accumulator[...] * rescale + product(value, weights.astype(value.dtype), (0, 0), plan.scores)


def _normalised(accumulator, maximum, total):
    empty = total[...] == 0.0
    divisor = jnp.where(empty, 1.0, total[...])
    return accumulator[...] / divisor, jnp.where(empty, -jnp.inf, maximum[...] + jnp.log(divisor))
