"""The backward of a whole ring as one kernel.

K/V travel again, as in the forward, and the float32 gradients of each half travel with it, one part of a step behind:

1. when the half and its gradients have arrived, the half is sent on, and a first sweep adds this rank's share to the gradients;
2. the gradients are sent after the half, and while they travel a second sweep adds the half's share to dQ;
3. in the last step they are sent home instead, straight to the rank that owns the half, into a buffer that nothing else writes.

The gradients have two places for each half, as K/V do. A rank changes a place only in its first sweep, between their arrival and
their departure, so the credit that a neighbour gives at the end of a step (rotation.py) is for its K/V and its gradients.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.launch import launch, pipeline
from jax_core.strategies.fused_ring.plan import SLOTS, TRAVELLING, Plan, Shards
from jax_core.strategies.fused_ring.rotation import (
    BOTH,
    device,
    freight,
    freight_semaphores,
    give_credits,
    meet,
    meeting_semaphores,
    part,
    source,
    wait_credits,
)
from jax_core.strategies.fused_ring.sweep import Sweep, ends, for_each_kind, make_sweep
from jax_core.strategies.fused_ring.tiles import logits, logits_gradient, product


class Rows(NamedTuple):
    """What is final of the query rows: ``dout [batch, heads, positions, value_dim]`` in the query's dtype; ``lse`` (inf where a row
    saw nothing or is padding) and ``delta``, both ``[batch, heads, 1, positions]`` float32."""

    dout: Any
    lse: Any
    delta: Any


class Gradients(NamedTuple):
    """Float32, without the scale: ``query [batch, heads, dim, positions]``, ``key [2, batch, kv_heads, positions of a half, dim]``,
    ``value`` likewise."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def backward(plan: Plan, rank, shards: Shards, rows: Rows, interpret) -> Gradients:
    travelling = 2, SLOTS, plan.batch, plan.kv_heads, plan.k.padded
    at_home = 2, plan.batch, plan.kv_heads, plan.k.padded
    shapes = {
        "dquery": (plan.batch, plan.heads, plan.dim, 2 * plan.q.padded),
        "dkey": (*travelling, plan.dim),
        "dvalue": (*travelling, plan.value_dim),
        "dkey_home": (*at_home, plan.dim),
        "dvalue_home": (*at_home, plan.value_dim),
    }
    results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    scratch = {
        "dquery_sum": pltpu.VMEM((plan.dim, plan.q.block), jnp.float32),
        "dkey_sum": pltpu.VMEM((plan.k.block, plan.dim), jnp.float32),
        "dvalue_sum": pltpu.VMEM((plan.k.block, plan.value_dim), jnp.float32),
        "home": pltpu.SemaphoreType.DMA((2,)),
        **meeting_semaphores(),
        **freight_semaphores("shards"),
        **freight_semaphores("gradients"),
    }
    given = {**shards._asdict(), **rows._asdict()}
    found = launch(partial(_kernel, plan), plan, rank, given, results, scratch, products=7, interpret=interpret)
    return Gradients(found["dquery"], found["dkey_home"], found["dvalue_home"])


def _kernel(plan: Plan, rank, refs: dict[str, Any]) -> None:
    shards = freight("shards", plan, rank, refs, TRAVELLING)
    gradients = freight("gradients", plan, rank, refs, ("dkey", "dvalue"))
    meet(plan, rank, refs["met"])

    def step_of_ring(step, _):
        moves_on = step < plan.hops

        @pl.when(step > 0)
        def _():
            shards.wait_arrived(step)
            gradients.wait_arrived(step)

        @pl.when((step > 0) & moves_on)
        def _():
            wait_credits(plan, refs["credit"])

        @pl.when(moves_on)
        def _():
            shards.depart(step)

        _differentiate_keys(plan, rank, step, refs)

        @pl.when(moves_on)
        def _():
            gradients.depart(step)

        @pl.when(jnp.logical_not(moves_on))
        def _():
            for copy in _home(plan, rank, refs):
                copy.start()

        _differentiate_queries(plan, rank, step, refs)

        @pl.when(moves_on)
        def _():
            shards.wait_departed(step)
            gradients.wait_departed(step)

        @pl.when(step + 1 < plan.hops)
        def _():
            give_credits(plan, rank, refs["credit"])

        return 0

    lax.fori_loop(0, plan.hops + 1, step_of_ring, 0)
    for copy in _home(plan, rank, refs):
        copy.wait()
    part(refs["met"])


def _home(plan: Plan, rank, refs: dict[str, Any]):
    """The way of the gradients to the ranks that own the halves which are here at the last step."""
    for half in BOTH:
        owner = device(plan, source(plan, rank, half, plan.hops))
        for name in ("dkey", "dvalue"):
            there = refs[f"{name}_home"].at[half]
            here = refs[name].at[half, plan.hops % SLOTS]
            yield pltpu.make_async_remote_copy(here, there, refs["gradients_sent"].at[half], refs["home"].at[half], owner)


def _inputs(sweep: Sweep) -> dict[str, pl.BlockSpec]:
    plan = sweep.plan
    return {
        "query": sweep.rows(plan.dim),
        "key": sweep.keys(plan.dim),
        "value": sweep.keys(plan.value_dim),
        "dout": sweep.rows(plan.value_dim),
        "lse": sweep.columns(1),
        "delta": sweep.columns(1),
        **sweep.segments(),
    }


def _differentiate_keys(plan: Plan, rank, step, refs: dict[str, Any]) -> None:
    """This rank's share is added to the gradients of the halves that are here, in their place."""
    sweep = make_sweep(plan, rank, step, over_queries=True)
    carry = {"dkey": sweep.keys(plan.dim), "dvalue": sweep.keys(plan.value_dim)}
    pipeline(partial(_keys_kernel, sweep, step, refs), sweep.grid, _inputs(sweep), carry, refs)


def _differentiate_queries(plan: Plan, rank, step, refs: dict[str, Any]) -> None:
    sweep = make_sweep(plan, rank, step, over_queries=False)
    pipeline(partial(_queries_kernel, sweep, step, refs), sweep.grid, _inputs(sweep), {"dquery": sweep.columns(plan.dim)}, refs)


def _keys_kernel(sweep: Sweep, step, refs, blocks: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    sums = {name: refs[f"{name}_sum"] for name in ("dkey", "dvalue")}

    def add(hidden_by):
        weights, dlogits = _weights_and_gradient(sweep.plan, blocks, hidden_by)
        query, dout = blocks["query"][...], blocks["dout"][...]
        sums["dvalue"][...] += product(weights.astype(dout.dtype), dout, (1, 0), sweep.plan.scores)
        sums["dkey"][...] += product(dlogits.astype(query.dtype), query, (1, 0), sweep.plan.scores)

    _summed(sweep, step, blocks, sums, before, after, add)


def _queries_kernel(sweep: Sweep, step, refs, blocks: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    sums = {"dquery": refs["dquery_sum"]}

    def add(hidden_by):
        _, dlogits = _weights_and_gradient(sweep.plan, blocks, hidden_by)
        key = blocks["key"][...]
        sums["dquery"][...] += product(key, dlogits.astype(key.dtype), (0, 0), sweep.plan.scores)

    _summed(sweep, step, blocks, sums, before, after, add)


def _summed(sweep: Sweep, step, blocks, sums: dict[str, Any], before, after, add) -> None:
    """What was there before this step (nothing before the first), and the shares of all tiles."""
    first, last = ends()
    for name, total in sums.items():

        @pl.when(first & (step == 0))
        def _(total=total):
            total[...] = jnp.zeros_like(total)

        @pl.when(first & (step > 0))
        def _(total=total, name=name):
            total[...] = before[name][...]

    for_each_kind(sweep, blocks, add)

    @pl.when(last)
    def _():
        for name, total in sums.items():
            after[name][...] = total[...]


def _weights_and_gradient(plan: Plan, blocks: dict[str, Any], hidden_by):
    """A tile's softmax weights and the gradient of its ``q . k``, both ``[keys, queries]`` float32."""
    x, tanh = logits(plan.scores, blocks["query"][...], blocks["key"][...], hidden_by)
    weights = jnp.exp(x - blocks["lse"][...])
    dweights = product(blocks["value"][...], blocks["dout"][...], (1, 1), plan.scores)
    return weights, logits_gradient(plan.scores, weights, dweights, blocks["delta"][...], tanh)
