"""The launches of the Pallas kernels (TPU) of the kernel contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.blocks import BlockSparsity, out_of_blocks
from jax_core.kernels.contract import Grads, KernelConfig, Pair, Partial, Residuals
from jax_core.kernels.tpu import costs, launch, params
from jax_core.kernels.tpu.backward_kernels import bias_kernel, keys_kernel, queries_kernel
from jax_core.kernels.tpu.constants import (
    BlockedExtras,
    Shards,
    TileConstants,
    block_extras,
    blocked_rows,
    blocked_statistics,
    make_constants,
    make_scalars,
    quotient,
    remainder,
)
from jax_core.kernels.tpu.forward_kernel import forward_kernel
from jax_core.kernels.tpu.schedule import BlockSchedule, flags_of, make_schedule, pairs_to_visit, visit
from jax_core.kernels.tpu.specs import Place, Specs


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    const = make_constants(pair, _fitting(config, pair))
    blocked = block_extras(const, pair)
    schedule = make_schedule(pairs_to_visit(const, pair, blocked))
    before = None if carry is None else (blocked_rows(carry.out, const.q), blocked_statistics(carry.lse, const.q))
    specs = Specs(const, _place(const, schedule))
    size = const.q.block
    results = (
        jax.ShapeDtypeStruct((const.batch, const.heads, const.q.blocks * size, const.value_dim), out_dtype),
        jax.ShapeDtypeStruct((const.batch, const.heads, 1, const.q.blocks * size), jnp.float32),
    )
    result_specs = specs.query(const.value_dim), specs.query_statistics()
    inputs = _shards(const, pair), blocked, before
    out, lse = launch.launch(
        partial(forward_kernel, const, schedule.size),
        (schedule.words, make_scalars(pair)),
        inputs,
        (specs.shards(), specs.extras(blocked), None if carry is None else result_specs),
        results,
        result_specs,
        grid=(const.batch, const.heads, schedule.longest),
        scratch=[pltpu.VMEM((size, columns), jnp.float32) for columns in (1, 1, const.value_dim)],
        aliases=_in_place(inputs, before, results),
        cost=costs.forward(const, pair.q.dtype),
        generation=config.generation,
    )
    return Partial(_from_rows(out, const), _from_statistics(lse, const))


def backward(pair: Pair, residuals: Residuals, dq: Array | None, config: KernelConfig[BwdParams]) -> Grads[Array]:
    """Deterministic in any case."""
    const = make_constants(pair, _fitting(config, pair))
    blocked, extras = block_extras(const, pair), pair.extras
    pairs = pairs_to_visit(const, pair, blocked)
    shards = _shards(const, pair)._replace(
        dout=blocked_rows(residuals.dout, const.q),
        lse=blocked_statistics(residuals.lse, const.q, jnp.inf),  # padding rows also have weights exp(-inf) = 0
        delta=blocked_statistics(residuals.delta, const.q),
    )
    run = _Backward(const, shards, blocked, pairs, make_scalars(pair), config.generation)
    before = None if dq is None else blocked_rows(dq, const.q)
    if config.fused:
        dk, dv, dslopes, dquery = run.keys(jnp.zeros(shards.q.shape, jnp.float32) if before is None else before)
        assert dquery is not None
    else:
        dk, dv, dslopes, _ = run.keys(None)
        dquery = run.queries(before)
    return Grads(
        _from_rows(dquery, const),
        _from_rows(dk, const, of_keys=True),
        _from_rows(dv, const, of_keys=True),
        None if extras.bias is None else run.bias(extras.bias.shape),
        None if dslopes is None or extras.alibi_slopes is None else _slope_gradient(dslopes, extras.alibi_slopes),
    )


@dataclass(frozen=True)
class _Backward:
    """The launches of a backward pass over one pair of shards."""

    const: TileConstants
    shards: Shards[Array]
    blocked: BlockedExtras[Array]
    pairs: BlockSparsity
    scalars: Array
    generation: str

    def queries(self, before: Array | None) -> Array:
        """dQ, ``[batch, heads, length in blocks, dim]``, added to ``before``, the dQ so far."""
        const, schedule = self.const, make_schedule(self.pairs)
        specs = Specs(const, _place(const, schedule))
        inputs = self.shards, self.blocked, before
        result = jax.ShapeDtypeStruct(self.shards.q.shape, jnp.float32)
        (dq,) = launch.launch(
            partial(queries_kernel, const, schedule.size),
            (schedule.words, self.scalars),
            inputs,
            (specs.shards(backward=True), specs.extras(self.blocked), None if before is None else specs.query(const.dim)),
            [result],
            [specs.query(const.dim)],
            grid=(const.batch, const.heads, schedule.longest),
            scratch=[pltpu.VMEM((const.q.block, const.dim), jnp.float32)],
            aliases=_in_place(inputs, before, [result]),
            cost=costs.queries(const, self.shards.q.dtype),
            generation=self.generation,
        )
        return dq

    def keys(self, dq: Array | None) -> tuple[Array, Array, Array | None, Array | None]:
        """``(dk, dv, dslopes or None, dq or None)``; if ``dq`` is given, the same sweep adds to it."""
        const, schedule = self.const, make_schedule(self.pairs, by_columns=True)
        specs = Specs(const, _place_of_member(const, schedule))
        block, whole = (const.q.block, const.k.block), pl.BlockSpec(memory_space=pl.ANY)
        slopes = None if self.blocked.slopes is None else (const.batch, const.kv_heads, const.k.blocks, const.group, block[0])
        shapes = self.shards.k.shape, self.shards.v.shape, slopes, None if dq is None else dq.shape
        results = [None if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        inputs = self.shards, self.blocked, dq
        scratch = [
            pltpu.VMEM(shape, jnp.float32)
            for shape in ((block[1], const.dim), (block[1], const.value_dim), (const.group, 1, block[0]))
        ]
        if dq is not None:
            scratch += [pltpu.VMEM((block[0], const.dim), jnp.float32), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA]
        dk, dv, dslopes, dq = launch.launch(
            partial(keys_kernel, const, schedule.size),
            (schedule.words, self.scalars),
            inputs,
            (specs.shards(backward=True), specs.extras(self.blocked), None if dq is None else whole),
            results,
            [
                specs.key(const.dim),
                specs.key(const.value_dim),
                None if slopes is None else specs.slopes(),
                None if dq is None else whole,
            ],
            grid=(const.batch, const.kv_heads, schedule.longest, const.group),
            scratch=scratch,
            aliases=_in_place(inputs, dq, [x for x in results if x is not None]),
            cost=costs.keys(const, self.shards.q.dtype, fused=dq is not None),
            generation=self.generation,
            all_in_blocks=dq is None,
        )
        return dk, dv, dslopes, dq

    def bias(self, shape: tuple[int, ...]) -> Array:
        """The gradient of a bias of ``shape``."""
        const, bias = self.const, self.blocked.bias
        assert bias is not None
        split = [length > 1 for length in bias.shape[:3]]
        counts = const.batch, const.heads, const.q.blocks
        outer = [count if varies else 1 for count, varies in zip(counts, split, strict=True)]
        inner = [1 if varies else count for count, varies in zip(counts, split, strict=True)]
        place = partial(_place_of_tile, inner)
        specs = Specs(const, place)
        (dbias,) = launch.launch(
            partial(bias_kernel, const, place),
            (flags_of(self.pairs).reshape(-1).astype(jnp.int32), self.scalars),
            (self.shards, self.blocked),
            (specs.shards(backward=True), specs.extras(self.blocked)),
            [jax.ShapeDtypeStruct(bias.shape, jnp.float32)],
            [specs.tile(bias)],
            grid=(*outer, const.k.blocks, inner[0] * inner[1] * inner[2]),
            scratch=[pltpu.VMEM((const.q.block if split[2] else 1, const.k.block), jnp.float32)],
            aliases={},
            cost=costs.bias(const, self.shards.q.dtype),
            generation=self.generation,
        )
        dbias = out_of_blocks(dbias, 3, const.k)
        return (dbias if shape[2] == 1 else out_of_blocks(dbias, 2, const.q)).reshape(shape)


def _place(const: TileConstants, schedule: BlockSchedule) -> Callable[..., Place]:
    """The place of a visit on the grid (batch, head, visit)."""

    def place(batch: Array, head: Array, number: Array, words: Ref, *rest: Ref) -> Place:
        del rest
        q, k, _ = visit(const, schedule.size, words, batch, number)
        return batch, head, q, k

    return place


def _place_of_member(const: TileConstants, schedule: BlockSchedule) -> Callable[..., Place]:
    """The place of a visit on the grid (batch, key head, visit, head of the group)."""

    def place(batch: Array, kv_head: Array, number: Array, member: Array, words: Ref, *rest: Ref) -> Place:
        del rest
        q, k, _ = visit(const, schedule.size, words, batch, number)
        return batch, kv_head * const.group + member, q, k

    return place


def _place_of_tile(inner: list[int], batch: Array, head: Array, q: Array, k: Array, number: Array, *rest: Ref) -> Place:
    """The place on the grid of bias tiles and, as its last axis, the score tiles that share one: each sum below has a zero term."""
    del rest
    heads, rows = inner[1:]
    further = quotient(number, heads * rows), remainder(quotient(number, rows), heads), remainder(number, rows)
    return batch + further[0], head + further[1], q + further[2], k


def _shards(const: TileConstants, pair: Pair) -> Shards[Array]:
    return Shards(blocked_rows(pair.q, const.q), blocked_rows(pair.k, const.k), blocked_rows(pair.v, const.k))


def _from_rows(x: Array, const: TileConstants, of_keys: bool = False) -> Array:
    return jnp.swapaxes(out_of_blocks(x, 2, const.k if of_keys else const.q), 1, 2)


def _from_statistics(x: Array, const: TileConstants) -> Array:
    return out_of_blocks(x[:, :, 0], 2, const.q)


def _in_place(inputs: Sequence[object], before: object, results: Sequence[jax.ShapeDtypeStruct]) -> dict[int, int]:
    """The aliases of a launch: ``before`` is the last leaves of ``inputs``; the last results reuse its buffers if dtypes match."""
    first = len(jax.tree.leaves(inputs)) - len(jax.tree.leaves(before))
    last = len(results) - len(jax.tree.leaves(before))
    pairs = enumerate(jax.tree.leaves(before))
    return {first + i: last + i for i, x in pairs if x.dtype == results[last + i].dtype}


def _slope_gradient(dslopes: Array, slopes: Array) -> Array:
    """``[batch, kv_heads, key blocks, group, q] -> [batch|1, heads]``"""
    dslopes = dslopes.sum((2, 4)).reshape(dslopes.shape[0], -1)
    return dslopes if slopes.shape[0] == dslopes.shape[0] else dslopes.sum(0, keepdims=True)


def _fitting(config: KernelConfig, pair: Pair) -> tuple[int, int]:
    """The block sizes, no longer than the runs need."""
    q, k = params.block_sizes(config.params)
    return params.fitting(q, pair.q_runs[0].length), params.fitting(k, pair.k_runs[0].length)
