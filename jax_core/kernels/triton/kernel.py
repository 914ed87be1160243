"""The Triton kernels under the kernel contract: what they take, and their launches."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.blocks import same_rows, starts
from jax_core.kernels.contract import ANY_SCORE, Grads, KernelConfig, Pair, Partial, Problem, Residuals
from jax_core.kernels.triton import launch, params
from jax_core.kernels.triton.constants import LaunchConstants, make_constants
from jax_core.kernels.triton.tables import Tables, make_tables

_WIDEST = 256
_GRID = 65535  # programs along the second and third grid dimensions
_DTYPES = ("float16", "bfloat16", "float32")
CONTINUES = True
CAPABILITIES = ANY_SCORE | frozenset("keys apart wide_ids fused_backward deterministic float16 bfloat16 float32".split())


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if max(problem.dim, problem.value_dim) > _WIDEST:
        return f"head dims are at most {_WIDEST}, got {problem.dim} and {problem.value_dim}"
    if problem.scores.logits_dtype not in (None, *_DTYPES):
        return f"logits_dtype is one of {', '.join(_DTYPES)}, got {problem.scores.logits_dtype}"
    if max(problem.batch, problem.heads, problem.batch * problem.heads if "bias" in problem.features else 0) > _GRID:
        return f"a GPU takes at most {_GRID} batch entries and heads (their product, with a bias)"
    if {"deterministic", "fused_backward"} <= problem.features:
        return "Triton's backward in one sweep adds dQ in any order; without fused_backward it is deterministic"
    return launch.missing(problem.backend, problem.capability) or _params_reason(problem, forward, backward)


def _params_reason(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    packed = "mask" in problem.features or problem.scores.predicates
    for name, part in (("fwd_params", forward), ("bwd_params", backward)):
        q, k = _blocks(part)
        if not all(16 <= size <= 256 and size & (size - 1) == 0 for size in (q, k)):
            return f"{name}: block sizes must be powers of two from 16 to 256, got {q} x {k}"
        if packed and min(k, 32 if part is forward else q) < 32:
            return f"with a mask or mask function {name} needs blocks of at least 32, got {q} x {k}"
        if part.num_warps not in (1, 2, 4, 8, 16) or not 1 <= (part.num_stages or 0) <= 8:
            return f"{name}: num_warps must be 1, 2, 4, 8 or 16 and num_stages 1 to 8, got {part.num_warps} and {part.num_stages}"
        # The side that stays, and the side that is loaded at every stage.
        still, coming = (q, k) if part is forward else (k, q)
        needed = params.shared_memory(problem, still, coming, part)
        if needed > params.shared_memory_of(problem.capability):
            return f"{name}: tiles of {q} x {k} need {needed} bytes of shared memory, more than this GPU has for a program"
    return None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    if max(problem.dim, problem.value_dim) > _WIDEST or launch.missing(problem.backend, problem.capability):
        return FwdParams(16, 16), BwdParams(16, 16)  # not used: unsupported() says why
    return params.default_params(problem)


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    from jax_core.kernels.triton.forward_kernel import forward_kernel  # loads Triton

    pair, blocks = _prepared(pair), _blocks(config.params)
    (q, k, v), tables = pair.shards, make_tables(pair, blocks)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), out_dtype)
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    # The output and the LSE overwrite the carry; if the last pair's output has another dtype, only the LSE does.
    before: list[Array | None] = [None, None] if carry is None else []
    in_place: list[Array] = [] if carry is None else [carry.out, carry.lse]
    outputs = [lse, out] if carry is None else []
    if carry is not None and carry.out.dtype != out_dtype:
        before, in_place, outputs = [carry.out], [carry.lse], [out]
    const = make_constants(pair, blocks, carry=carry is not None, in_place=len(in_place), **tables.settings)
    inputs = [q, k, v, *_positional(pair), tables.bits, *tables.lists(True, config), *before]
    grid = const.q.blocks, const.heads, const.batch
    results = launch.launch(forward_kernel, inputs, in_place, outputs, const=const, grid=grid, config=config)
    return Partial(*(results if len(in_place) == 2 else results[::-1]))


def backward(pair: Pair, residuals: Residuals, dq: Array | None, config: KernelConfig[BwdParams]) -> Grads[Array]:
    """Two sweeps are deterministic; one is not, and refused where that is asked for."""
    from jax_core.kernels.triton.backward_kernels import bias_kernel, keys_kernel, queries_kernel

    fused, blocks = config.fused, _blocks(config.params)
    pair = _prepared(pair)
    (q, k, v), extras = pair.shards, pair.extras
    arrays = [q, k, v, residuals.dout, residuals.lse, residuals.delta, *_positional(pair)]
    over_queries = _make_pass(pair, arrays, config, blocks)

    before = dq
    dq = jnp.zeros(q.shape, jnp.float32) if fused and dq is None else dq
    slopes = (1,) if extras.alibi_slopes is None else (q.shape[0], q.shape[2], k.shape[1])
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (slopes, k.shape, v.shape)]
    const, launched = over_queries.constants(of_keys=False, fused=fused)
    if fused:
        dq, dslopes, dk, dv = launched(keys_kernel, [], [dq], outputs, (const.k.blocks, const.kv_heads, const.batch))
    else:
        dslopes, dk, dv = launched(keys_kernel, [None, None], [], outputs, (const.k.blocks, const.kv_heads, const.batch))
        turned = _make_pass(pair, arrays, config, blocks[::-1])
        const, launched = turned.constants(of_keys=True, carry=before is not None)
        grid = const.q.blocks, const.heads, const.batch
        if before is None:
            (dq,) = launched(queries_kernel, [None], [], [jax.ShapeDtypeStruct(q.shape, jnp.float32)], grid)
        else:
            (dq,) = launched(queries_kernel, [], [before], [], grid)
    dbias = None
    if extras.bias is not None:
        const, launched = over_queries.constants(of_keys=None)
        grid = 1 if const.bias_rows == 1 else const.q.blocks, const.k.blocks, const.bias_batch * const.bias_heads
        (dbias,) = launched(bias_kernel, [], [], [jax.ShapeDtypeStruct(extras.bias.shape, jnp.float32)], grid)
    return Grads(dq, dk, dv, dbias, None if extras.alibi_slopes is None else _slope_gradient(dslopes, extras.alibi_slopes))


class _Pass(NamedTuple):
    """A pair of shards, cut into blocks of one size."""

    make_constants: Callable[..., LaunchConstants]
    tables: Tables
    arrays: list[Array | None]
    config: KernelConfig

    def constants(self, of_keys: bool | None, **settings: bool | int) -> tuple[LaunchConstants, Callable[..., tuple[Array, ...]]]:
        """The constants, and a function that launches a kernel: ``(kernel, more inputs, in_place, outputs, grid)``. ``of_keys``:
        whether key blocks are visited (True) or query blocks (False); None: all pairs."""
        const = self.make_constants(**settings)
        lists = (None, None) if of_keys is None else self.tables.lists(of_keys, self.config)
        inputs = [*self.arrays, self.tables.bits, *lists]

        def launched(
            kernel: Callable,
            more: list[Array | None],
            in_place: list[Array],
            outputs: list[jax.ShapeDtypeStruct],
            grid: tuple[int, ...],
        ) -> tuple[Array, ...]:
            return launch.launch(kernel, inputs + more, in_place, outputs, const=const, grid=grid, config=self.config)

        return const, launched


def _make_pass(pair: Pair, arrays: list[Array | None], config: KernelConfig, blocks: tuple[int, int]) -> _Pass:
    tables = make_tables(pair, blocks)
    return _Pass(partial(make_constants, pair, blocks, **tables.settings), tables, arrays, config)


def _slope_gradient(dslopes: Array, slopes: Array) -> Array:
    """``[batch, heads, keys]`` -> the shape of the slopes, ``[batch|1, heads]``."""
    return dslopes.sum(-1) if slopes.shape[0] == dslopes.shape[0] else dslopes.sum((0, -1))[None]


def _blocks(params: FwdParams) -> tuple[int, int]:
    return params.q_blocksize, params.kv_blocksize  # type: ignore[return-value]  # complete by now


def _positional(pair: Pair) -> list[Array | None]:
    """The middle arguments of the kernels: the shards' starts, ids, bias, slopes, seed."""
    extras = pair.extras
    ids = extras.q_segment_ids, extras.kv_segment_ids, extras.q_position_ids, extras.kv_position_ids
    return [starts(pair), *ids, extras.bias, extras.alibi_slopes, extras.dropout_seed]


def _prepared(pair: Pair) -> Pair:
    """With the same number of rows of ids on both sides, as the kernels expect."""
    extras = pair.extras
    q_segments, kv_segments = same_rows(extras.q_segment_ids, extras.kv_segment_ids)
    q_positions, kv_positions = same_rows(extras.q_position_ids, extras.kv_position_ids)
    extras = extras._replace(q_segment_ids=q_segments, kv_segment_ids=kv_segments)
    return replace(pair, extras=extras._replace(q_position_ids=q_positions, kv_position_ids=kv_positions))
