"""The forward of a whole ring as one kernel.

At each step the halves that are here are sent on, and while they travel every query block meets them: the online softmax goes on
from the partial result in HBM, which is normalised at every step and needs no more than its LSE to be continued.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.pallas.fused_launch import launch, pipeline
from jax_core.kernels.pallas.fused_plan import SLOTS, Plan, halves
from jax_core.kernels.pallas.fused_rotation import Freight, give_credits, meet, source, wait_credits
from jax_core.kernels.pallas.fused_tiles import has_pairs, is_full, logits, make_tile, product


class Shards(NamedTuple):
    """``query [batch, heads, positions, dim]``, ``q_segments [batch, 1, positions]`` or None; of what travels
    ``key [2, SLOTS, batch, kv_heads, positions of a half, dim]``, ``value`` likewise, ``k_segments [2, SLOTS, batch, 1, positions of
    a half]`` or None, the rank's own in slot 0. Positions are padded to whole blocks, half by half."""

    query: Any
    key: Any
    value: Any
    q_segments: Any = None
    k_segments: Any = None


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
        "sent": pltpu.SemaphoreType.DMA((2,)),
        "arrived": pltpu.SemaphoreType.DMA((2, SLOTS)),
        "credit": pltpu.SemaphoreType.REGULAR((2,)),
    }
    given = shards._asdict()
    travelling = ("key", "value", "k_segments")
    found = launch(partial(_kernel, plan), plan, rank, given, travelling, results, scratch, products=2, interpret=interpret)
    return found["out"], found["lse"]


def _kernel(plan: Plan, rank, refs: dict[str, Any]) -> None:
    travelling = tuple(refs[name] for name in ("key", "value", "k_segments") if name in refs)
    freight = Freight(plan, rank, travelling, refs["sent"], refs["arrived"])
    meet(plan, rank)

    def step_of_ring(step, _):
        moves_on = step < plan.hops

        @pl.when(step > 0)
        def _():
            freight.wait_arrived(step)

        @pl.when((step > 0) & moves_on)
        def _():
            wait_credits(plan, refs["credit"])

        @pl.when(moves_on)
        def _():
            freight.depart(step)

        _attend(plan, rank, step, refs)

        @pl.when(moves_on)
        def _():
            freight.wait_departed(step)

        @pl.when(step + 1 < plan.hops)
        def _():
            give_credits(plan, rank, refs["credit"])

        return 0

    lax.fori_loop(0, plan.hops + 1, step_of_ring, 0)


def _attend(plan: Plan, rank, step, refs: dict[str, Any]) -> None:
    """Every query block over the two halves that are here."""
    q_halves = halves(plan.layout, rank, plan.size, plan.q.length)
    k_halves = tuple(halves(plan.layout, source(plan, rank, half, step), plan.size, plan.k.length)[half] for half in (0, 1))
    slot = lax.rem(step, SLOTS)

    def tile(i, j):
        return make_tile(plan, q_halves, k_halves, i, j)

    def of_queries(b, h, i, j):
        return b, h, i, 0

    def columns_of_queries(b, h, i, j):
        return b, h, 0, i

    def of_keys(b, h, i, j):
        # What a tile without pairs would bring is not brought: it names the half's first block, again and again.
        half = lax.div(j, plan.k.blocks)
        block = jnp.where(has_pairs(plan.scores.mask, tile(i, j)), j - half * plan.k.blocks, 0)
        return half, slot, b, lax.div(h, plan.group), block, 0

    def segments_of_keys(b, h, i, j):
        half, slot, b, _, block, _ = of_keys(b, h, i, j)
        return half, slot, b, 0, block

    carry = {
        "out": pl.BlockSpec((None, None, plan.value_dim, plan.q.block), columns_of_queries),
        "lse": pl.BlockSpec((None, None, 1, plan.q.block), columns_of_queries),
    }
    inputs = {
        "query": pl.BlockSpec((None, None, plan.q.block, plan.dim), of_queries),
        "key": pl.BlockSpec((None, None, None, None, plan.k.block, plan.dim), of_keys),
        "value": pl.BlockSpec((None, None, None, None, plan.k.block, plan.value_dim), of_keys),
        "q_segments": pl.BlockSpec((None, 1, plan.q.block), lambda b, h, i, j: (b, 0, i)),
        "k_segments": pl.BlockSpec((None, None, None, 1, plan.k.block), segments_of_keys),
    }
    grid = plan.batch, plan.heads, 2 * plan.q.blocks, 2 * plan.k.blocks
    pipeline(partial(_tile_kernel, plan, step, tile, refs), grid, inputs, carry, refs)


def _tile_kernel(plan: Plan, step, tile, refs, blocks: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    state = refs["accumulator"], refs["maximum"], refs["total"]
    i, j = pl.program_id(2), pl.program_id(3)
    here = tile(i, j)

    @pl.when((j == 0) & (step == 0))
    def _():
        _begin(*state)

    @pl.when((j == 0) & (step > 0))
    def _():
        _continue(*state, before["out"][...], before["lse"][...])

    seen, whole = has_pairs(plan.scores.mask, here), is_full(plan, here)

    @pl.when(seen & whole)
    def _():
        _add_tile(plan, blocks, None, *state)

    @pl.when(seen & jnp.logical_not(whole))
    def _():
        _add_tile(plan, blocks, here, *state)

    @pl.when(j == pl.num_programs(3) - 1)
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


def _add_tile(plan: Plan, blocks, tile, accumulator, maximum, total) -> None:
    """Milakov and Gimelshein 2018, arXiv:1805.02867: the online softmax."""
    hidden_by = None if tile is None else (tile, *(_read(blocks, name) for name in ("q_segments", "k_segments")))
    x, _ = logits(plan.scores, blocks["query"][...], blocks["key"][...], hidden_by)
    highest = jnp.maximum(maximum[...], jnp.max(x, axis=0, keepdims=True))
    finite = jnp.where(highest == -jnp.inf, 0.0, highest)
    rescale, weights = jnp.exp(maximum[...] - finite), jnp.exp(x - finite)
    maximum[...] = highest
    total[...] = total[...] * rescale + jnp.sum(weights, axis=0, keepdims=True)
    value = blocks["value"][...]
    accumulator[...] = accumulator[...] * rescale + product(value, weights.astype(value.dtype), (0, 0), plan.scores)


def _read(blocks: dict[str, Any], name: str):
    return blocks[name][...] if name in blocks else None


def _normalised(accumulator, maximum, total):
    empty = total[...] == 0.0
    divisor = jnp.where(empty, 1.0, total[...])
    return accumulator[...] / divisor, jnp.where(empty, -jnp.inf, maximum[...] + jnp.log(divisor))
