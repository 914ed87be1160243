"""The forward of a whole ring as one kernel.

At each step the current halves are sent on; meanwhile every query block attends to them, continuing the online softmax from the
partial result in HBM. The partial result is normalised at every step, so its LSE is enough to continue from it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu import softmax
from jax_core.kernels.tpu.scores import product
from jax_core.kernels.tpu.softmax import SoftmaxState
from jax_core.strategies.fused_ring.constants import ROTATING, Refs, RingConstants, Shards
from jax_core.strategies.fused_ring.frame import Stage, run_ring
from jax_core.strategies.fused_ring.launch import launch, pipeline
from jax_core.strategies.fused_ring.rotation import ring_semaphores, transfer, transfer_semaphores
from jax_core.strategies.fused_ring.sweep import Sweep, ends, for_each_kind, make_sweep
from jax_core.strategies.fused_ring.tiles import HiddenBy, logits


def forward(const: RingConstants, rank: Array, shards: Shards) -> tuple[Array, Array]:
    """``(out [batch, heads, value_dim, positions], lse [batch, heads, 1, positions])``, float32, natural log, ``-inf`` where a row
    saw nothing (its ``out`` is 0)."""
    positions = 2 * const.q.padded
    results = {
        "out": jax.ShapeDtypeStruct((const.batch, const.heads, const.value_dim, positions), jnp.float32),
        "lse": jax.ShapeDtypeStruct((const.batch, const.heads, 1, positions), jnp.float32),
    }
    scratch = {
        "numerator": pltpu.VMEM((const.value_dim, const.q.block), jnp.float32),
        "maximum": pltpu.VMEM((1, const.q.block), jnp.float32),
        "denominator": pltpu.VMEM((1, const.q.block), jnp.float32),
        **ring_semaphores(),
        **transfer_semaphores("shards"),
    }
    outputs = launch(partial(_kernel, const), const, rank, shards._asdict(), results, scratch, products=2)
    return outputs["out"], outputs["lse"]


def _kernel(const: RingConstants, rank: Array, refs: Refs) -> None:
    shards = transfer("shards", const, rank, refs, ROTATING)
    run_ring(const, rank, refs, [Stage(shards, partial(_attend_to_halves, const, rank, refs))])


def _attend_to_halves(const: RingConstants, rank: Array, refs: Refs, step: Array) -> None:
    """Every query block attends to the two current halves."""
    sweep = make_sweep(const, rank, step, over_queries=False)
    inputs = {
        "query": sweep.rows(const.dim),
        "key": sweep.keys(const.dim),
        "value": sweep.keys(const.value_dim),
        **sweep.segments(),
    }
    carry = {"out": sweep.columns(const.value_dim), "lse": sweep.columns(1)}
    pipeline(partial(_tile_kernel, sweep, step, refs), sweep.grid, inputs, carry, refs)


def _tile_kernel(sweep: Sweep, step: Array, refs: Refs, blocks: Refs, before: Refs, after: Refs) -> None:
    state = SoftmaxState(refs["maximum"], refs["denominator"], refs["numerator"])
    first, last = ends()

    @pl.when(first & (step == 0))
    def _() -> None:
        softmax.start(state)

    @pl.when(first & (step > 0))
    def _() -> None:
        softmax.resume(state, before["out"], before["lse"][...])

    for_each_kind(sweep, blocks, partial(_add_tile, sweep.const, blocks, state))

    @pl.when(last)
    def _() -> None:
        softmax.finish(state, after["out"], after["lse"])


def _add_tile(const: RingConstants, blocks: Refs, state: SoftmaxState, hidden_by: HiddenBy | None) -> None:
    x, _ = logits(const.scores, blocks["query"][...], blocks["key"][...], hidden_by)

    def weigh(weights: Array) -> Array:
        value = blocks["value"][...]
        return product(value, weights.astype(value.dtype), (0, 0), const.scores)

    softmax.update(state, x, 0, weigh)
