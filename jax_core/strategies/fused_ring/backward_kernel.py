"""The backward of a whole ring as one kernel.

K/V rotate again, as in the forward, and the float32 gradients of each half follow it, one stage of a step later:

1. when the half and its gradients have arrived, the half is sent on, and a first sweep adds this rank's share to the gradients;
2. the gradients are sent after the half; meanwhile a second sweep adds the half's share to dQ;
3. in the last step the gradients instead go straight to the rank that owns the half, into a buffer that nothing else writes.

The gradients of each half have two slots, as K/V do. A rank changes a slot only in its first sweep, between the gradients' arrival
and their departure, so the credit that a neighbour gives at the end of a step (rotation.py) covers both K/V and their gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu.scores import product
from jax_core.strategies.fused_ring.constants import ROTATING, SLOTS, Refs, RingConstants, Shards
from jax_core.strategies.fused_ring.frame import Stage, run_ring
from jax_core.strategies.fused_ring.launch import launch, pipeline
from jax_core.strategies.fused_ring.rotation import ReturnTransfer, ring_semaphores, transfer, transfer_semaphores
from jax_core.strategies.fused_ring.sweep import Sweep, ends, for_each_kind, make_sweep
from jax_core.strategies.fused_ring.tiles import HiddenBy, logits, logits_gradient


class BlockedResiduals(NamedTuple):
    """What the backward needs per query row, in blocks: ``dout [batch, heads, positions, value_dim]`` in the query's dtype;
    ``lse`` (inf where a row saw nothing or is padding) and ``delta``, both ``[batch, heads, 1, positions]`` float32."""

    dout: Array
    lse: Array
    delta: Array


class Gradients(NamedTuple):
    """Float32, not yet multiplied by the scale: ``query [batch, heads, dim, positions]``, ``key [2, batch, kv_heads, positions of a
    half, dim]``, ``value`` likewise."""

    query: Array
    key: Array
    value: Array


def backward(const: RingConstants, rank: Array, shards: Shards, residuals: BlockedResiduals) -> Gradients:
    rotating = 2, SLOTS, const.batch, const.kv_heads, const.k.padded
    returned = 2, const.batch, const.kv_heads, const.k.padded
    shapes = {
        "dquery": (const.batch, const.heads, const.dim, 2 * const.q.padded),
        "dkey": (*rotating, const.dim),
        "dvalue": (*rotating, const.value_dim),
        "dkey_returned": (*returned, const.dim),
        "dvalue_returned": (*returned, const.value_dim),
    }
    results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    scratch = {
        "dquery_sum": pltpu.VMEM((const.dim, const.q.block), jnp.float32),
        "dkey_sum": pltpu.VMEM((const.k.block, const.dim), jnp.float32),
        "dvalue_sum": pltpu.VMEM((const.k.block, const.value_dim), jnp.float32),
        "returned": pltpu.SemaphoreType.DMA((2,)),
        **ring_semaphores(),
        **transfer_semaphores("shards"),
        **transfer_semaphores("gradients"),
    }
    given = {**shards._asdict(), **residuals._asdict()}
    outputs = launch(partial(_kernel, const), const, rank, given, results, scratch, products=7)
    return Gradients(outputs["dquery"], outputs["dkey_returned"], outputs["dvalue_returned"])


def _kernel(const: RingConstants, rank: Array, refs: Refs) -> None:
    shards = transfer("shards", const, rank, refs, ROTATING)
    gradients = transfer("gradients", const, rank, refs, ("dkey", "dvalue"))
    owners = refs["dkey_returned"], refs["dvalue_returned"]
    to_owners = ReturnTransfer(const, rank, gradients.buffers, owners, gradients.sent, refs["returned"])
    stages = [
        Stage(shards, partial(_differentiate_keys, const, rank, refs)),
        Stage(gradients, partial(_differentiate_queries, const, rank, refs), to_owners),
    ]
    run_ring(const, rank, refs, stages)


def _inputs(sweep: Sweep) -> dict[str, pl.BlockSpec]:
    const = sweep.const
    return {
        "query": sweep.rows(const.dim),
        "key": sweep.keys(const.dim),
        "value": sweep.keys(const.value_dim),
        "dout": sweep.rows(const.value_dim),
        "lse": sweep.columns(1),
        "delta": sweep.columns(1),
        **sweep.segments(),
    }


def _differentiate_keys(const: RingConstants, rank: Array, refs: Refs, step: Array) -> None:
    """Adds this rank's share to the gradients of the current halves, in place."""
    sweep = make_sweep(const, rank, step, over_queries=True)
    carry = {"dkey": sweep.keys(const.dim), "dvalue": sweep.keys(const.value_dim)}
    pipeline(partial(_keys_kernel, sweep, step, refs), sweep.grid, _inputs(sweep), carry, refs)


def _differentiate_queries(const: RingConstants, rank: Array, refs: Refs, step: Array) -> None:
    sweep = make_sweep(const, rank, step, over_queries=False)
    pipeline(partial(_queries_kernel, sweep, step, refs), sweep.grid, _inputs(sweep), {"dquery": sweep.columns(const.dim)}, refs)


def _keys_kernel(sweep: Sweep, step: Array, refs: Refs, blocks: Refs, before: Refs, after: Refs) -> None:
    sums = {name: refs[f"{name}_sum"] for name in ("dkey", "dvalue")}

    def add(hidden_by: HiddenBy | None) -> None:
        weights, dlogits = _weights_and_gradient(sweep.const, blocks, hidden_by)
        query, dout = blocks["query"][...], blocks["dout"][...]
        sums["dvalue"][...] += product(weights.astype(dout.dtype), dout, (1, 0), sweep.const.scores)
        sums["dkey"][...] += product(dlogits.astype(query.dtype), query, (1, 0), sweep.const.scores)

    _summed(sweep, step, blocks, sums, before, after, add)


def _queries_kernel(sweep: Sweep, step: Array, refs: Refs, blocks: Refs, before: Refs, after: Refs) -> None:
    sums = {"dquery": refs["dquery_sum"]}

    def add(hidden_by: HiddenBy | None) -> None:
        _, dlogits = _weights_and_gradient(sweep.const, blocks, hidden_by)
        key = blocks["key"][...]
        sums["dquery"][...] += product(key, dlogits.astype(key.dtype), (0, 0), sweep.const.scores)

    _summed(sweep, step, blocks, sums, before, after, add)


def _summed(
    sweep: Sweep,
    step: Array,
    blocks: Refs,
    sums: Refs,
    before: Refs,
    after: Refs,
    add: Callable[[HiddenBy | None], None],
) -> None:
    """Adds the shares of all tiles to the sums of the steps before (0 at the first step)."""
    first, last = ends()
    for name, total in sums.items():

        @pl.when(first & (step == 0))
        def _(total: Ref = total) -> None:
            total[...] = jnp.zeros_like(total)

        @pl.when(first & (step > 0))
        def _(total: Ref = total, name: str = name) -> None:
            total[...] = before[name][...]

    for_each_kind(sweep, blocks, add)

    @pl.when(last)
    def _() -> None:
        for name, total in sums.items():
            after[name][...] = total[...]


def _weights_and_gradient(const: RingConstants, blocks: Refs, hidden_by: HiddenBy | None) -> tuple[Array, Array]:
    """A tile's softmax weights and the gradient of its ``q . k``, both ``[keys, queries]`` float32."""
    x, tanh = logits(const.scores, blocks["query"][...], blocks["key"][...], hidden_by)
    weights = jnp.exp(x - blocks["lse"][...])
    dweights = product(blocks["value"][...], blocks["dout"][...], (1, 1), const.scores)
    return weights, logits_gradient(weights, dweights, blocks["delta"][...], tanh)
