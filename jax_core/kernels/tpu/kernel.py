"""The Pallas kernels (TPU) under the kernel contract: what they take, and their launches."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.blocks import BlockSparsity, out_of_blocks
from jax_core.kernels.contract import Extras, Grads, Partial, Problem, Residuals, Scores
from jax_core.kernels.tpu import costs, launch, params
from jax_core.kernels.tpu.backward_kernels import bias_kernel, keys_kernel, queries_kernel
from jax_core.kernels.tpu.forward_kernel import forward_kernel
from jax_core.kernels.tpu.plan import (
    Beside,
    Plan,
    Shards,
    Visits,
    kinds,
    list_visits,
    make_beside,
    make_pairs,
    make_plan,
    numbers_of,
    quotient,
    remainder,
    rows_of,
    visit,
    where_and_seed,
)
from jax_core.kernels.tpu.specs import Specs
from jax_core.masks.layout import Run

LANES = 128  # positions of a block are a multiple of it
_WIDEST = 256
_LISTED = 250_000  # of 4 bytes, in 1 MiB
_DTYPES = ("bfloat16", "float32")  # a TPU has no float16
_PRECISIONS = ("default", "fastest", "bfloat16", "highest", "float32")
HANDLES = frozenset(
    "causal left right chunk any_position softcap dropout_prob predicates precision logits_dtype "
    "bias mask q_segment_ids kv_segment_ids q_position_ids kv_position_ids alibi_slopes dropout_seed origin "
    "lse_gradient fused_backward bfloat16 float32".split()
)


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if max(problem.dim, problem.value_dim) > _WIDEST:
        return f"head dims are at most {_WIDEST}, got {problem.dim} and {problem.value_dim}"
    if problem.scores.logits_dtype not in (None, *_DTYPES):
        return f"logits_dtype is one of {', '.join(_DTYPES)}, got {problem.scores.logits_dtype}"
    if problem.scores.precision_name not in (None, *_PRECISIONS):
        return f"the Pallas kernels multiply in one of the precisions {', '.join(_PRECISIONS)}, got {problem.scores.precision}"
    return launch.missing(problem.backend) or _params_reason(problem, forward, backward)


def _params_reason(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    per_entry = problem.features & {"q_segment_ids", "q_position_ids", "mask"} or problem.scores.predicates
    for name, part in (("fwd_params", forward), ("bwd_params", backward)):
        if part.num_stages is not None or part.num_warps is not None:
            return f"{name}: the Pallas kernels have no stages or warps; leave num_stages and num_warps None"
        if any(size % LANES for size in _blocks(part)):
            return f"{name}: block sizes must be multiples of {LANES}, got {' x '.join(map(str, _blocks(part)))}"
        q, k = (-(-length // size) + 1 for length, size in zip((problem.q_length, problem.k_length), _blocks(part), strict=True))
        pairs = q * k * (problem.batch if per_entry else 1)
        if pairs > _LISTED:
            return f"{name}: a TPU's scalar memory lists {_LISTED} pairs of blocks, got {pairs}; give larger blocks"
    return None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    if launch.missing(problem.backend):
        return FwdParams(LANES, LANES), BwdParams(LANES, LANES)  # not used: unsupported() says why
    return params.default_params(problem, launch.generation())


def forward(
    q, k, v, q_runs, k_runs, *, diagonal: bool, scores: Scores, extras: Extras, carry: Partial | None, out_dtype, config: FwdParams
) -> Partial:
    del diagonal  # the runs say it
    plan = make_plan((q, k, v), q_runs, k_runs, scores, extras, _fitting(config, q_runs, k_runs))
    beside = make_beside(plan, (q, k, v), q_runs, k_runs, extras)
    visits = list_visits(make_pairs(plan, q_runs, k_runs, extras, beside))
    before = None if carry is None else (rows_of(carry.out, plan.q), numbers_of(carry.lse, plan.q))
    specs = Specs(plan, _place(plan, visits))
    size = plan.q.block
    results = (
        jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.q.blocks * size, plan.value_dim), out_dtype),
        jax.ShapeDtypeStruct((plan.batch, plan.heads, 1, plan.q.blocks * size), jnp.float32),
    )
    result_specs = specs.query(plan.value_dim), specs.query_numbers()
    inputs = _shards(plan, q, k, v), beside, before
    out, lse = launch.launch(
        partial(forward_kernel, plan, visits.size),
        (visits.words, where_and_seed(q_runs, k_runs, extras)),
        inputs,
        (specs.shards(), specs.beside(beside), None if carry is None else result_specs),
        results,
        result_specs,
        grid=(plan.batch, plan.heads, visits.count),
        scratch=[pltpu.VMEM((size, columns), jnp.float32) for columns in (1, 1, plan.value_dim)],
        aliases=_in_place(inputs, before, results),
        cost=costs.forward(plan, q.dtype),
    )
    return Partial(_from_rows(out, plan), _from_numbers(lse, plan))


def backward(
    q,
    k,
    v,
    residuals: Residuals,
    q_runs,
    k_runs,
    *,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    dq,
    fused: bool,
    config: BwdParams,
) -> Grads:
    del diagonal
    plan = make_plan((q, k, v), q_runs, k_runs, scores, extras, _fitting(config, q_runs, k_runs))
    beside = make_beside(plan, (q, k, v), q_runs, k_runs, extras)
    pairs = make_pairs(plan, q_runs, k_runs, extras, beside)
    shards = _shards(plan, q, k, v)._replace(
        dout=rows_of(residuals.dout, plan.q),
        lse=numbers_of(residuals.lse, plan.q, jnp.inf),  # padding too has weights exp(-inf) = 0
        delta=numbers_of(residuals.delta, plan.q),
    )
    run = _Backward(plan, shards, beside, pairs, where_and_seed(q_runs, k_runs, extras))
    before = None if dq is None else rows_of(dq, plan.q)
    if fused:
        dk, dv, dslopes, dq = run.keys(jnp.zeros(shards.q.shape, jnp.float32) if before is None else before)
    else:
        dk, dv, dslopes, _ = run.keys(None)
        dq = run.queries(before)
    return Grads(
        _from_rows(dq, plan),
        _from_rows(dk, plan, of_keys=True),
        _from_rows(dv, plan, of_keys=True),
        None if extras.bias is None else run.bias(extras.bias.shape),
        None if extras.alibi_slopes is None else _slope_gradient(dslopes, extras.alibi_slopes),
    )


class _Backward:
    """The launches of a backward pass over one pair of shards."""

    def __init__(self, plan: Plan, shards: Shards, beside: Beside, pairs: BlockSparsity, numbers):
        self.plan, self.shards, self.beside, self.pairs, self.numbers = plan, shards, beside, pairs, numbers

    def queries(self, before):
        """dQ, ``[batch, heads, length in blocks, dim]``."""
        plan, visits = self.plan, list_visits(self.pairs)
        specs = Specs(plan, _place(plan, visits))
        inputs = self.shards, self.beside, before
        result = jax.ShapeDtypeStruct(self.shards.q.shape, jnp.float32)
        (dq,) = launch.launch(
            partial(queries_kernel, plan, visits.size),
            (visits.words, self.numbers),
            inputs,
            (specs.shards(backward=True), specs.beside(self.beside), None if before is None else specs.query(plan.dim)),
            [result],
            [specs.query(plan.dim)],
            grid=(plan.batch, plan.heads, visits.count),
            scratch=[pltpu.VMEM((plan.q.block, plan.dim), jnp.float32)],
            aliases=_in_place(inputs, before, [result]),
            cost=costs.queries(plan, self.shards.q.dtype),
        )
        return dq

    def keys(self, dq):
        """``(dk, dv, dslopes or None, dq or None)``: with ``dq`` in one sweep, which adds to it."""
        plan, visits = self.plan, list_visits(self.pairs, by_columns=True)
        specs = Specs(plan, _place_of_member(plan, visits))
        block, whole = (plan.q.block, plan.k.block), pl.BlockSpec(memory_space=pl.ANY)
        slopes = None if self.beside.slopes is None else (plan.batch, plan.kv_heads, plan.k.blocks, plan.group, block[0])
        shapes = self.shards.k.shape, self.shards.v.shape, slopes, None if dq is None else dq.shape
        results = [shape and jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        inputs = self.shards, self.beside, dq
        scratch = [
            pltpu.VMEM(shape, jnp.float32)
            for shape in ((block[1], plan.dim), (block[1], plan.value_dim), (plan.group, 1, block[0]))
        ]
        if dq is not None:
            scratch += [pltpu.VMEM((block[0], plan.dim), jnp.float32), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA]
        return launch.launch(
            partial(keys_kernel, plan, visits.size),
            (visits.words, self.numbers),
            inputs,
            (specs.shards(backward=True), specs.beside(self.beside), None if dq is None else whole),
            results,
            [specs.key(plan.dim), specs.key(plan.value_dim), slopes and specs.slopes(), None if dq is None else whole],
            grid=(plan.batch, plan.kv_heads, visits.count, plan.group),
            scratch=scratch,
            aliases=_in_place(inputs, dq, [x for x in results if x is not None]),
            cost=costs.keys(plan, self.shards.q.dtype, fused=dq is not None),
            all_in_blocks=dq is None,
        )

    def bias(self, shape):
        """The gradient of a bias of ``shape``."""
        plan, bias = self.plan, self.beside.bias
        split = [length > 1 for length in bias.shape[:3]]
        counts = plan.batch, plan.heads, plan.q.blocks
        outer = [count if own else 1 for count, own in zip(counts, split, strict=True)]
        inner = [1 if own else count for count, own in zip(counts, split, strict=True)]
        place = partial(_place_of_tile, inner)
        specs = Specs(plan, place)
        (dbias,) = launch.launch(
            partial(bias_kernel, plan, place),
            (kinds(self.pairs).reshape(-1).astype(jnp.int32), self.numbers),
            (self.shards, self.beside),
            (specs.shards(backward=True), specs.beside(self.beside)),
            [jax.ShapeDtypeStruct(bias.shape, jnp.float32)],
            [specs.tile(bias)],
            grid=(*outer, plan.k.blocks, inner[0] * inner[1] * inner[2]),
            scratch=[pltpu.VMEM((plan.q.block if split[2] else 1, plan.k.block), jnp.float32)],
            aliases={},
            cost=costs.bias(plan, self.shards.q.dtype),
        )
        dbias = out_of_blocks(dbias, 3, plan.k)
        return (dbias if shape[2] == 1 else out_of_blocks(dbias, 2, plan.q)).reshape(shape)


def _place(plan: Plan, visits: Visits):
    """Of a visit on the grid (batch, head, visit)."""

    def place(batch, head, number, words, *_):
        q, k, _ = visit(plan, visits.size, words, batch, number)
        return batch, head, q, k

    return place


def _place_of_member(plan: Plan, visits: Visits):
    """Of a visit on the grid (batch, key head, visit, head of the group)."""

    def place(batch, kv_head, number, member, words, *_):
        q, k, _ = visit(plan, visits.size, words, batch, number)
        return batch, kv_head * plan.group + member, q, k

    return place


def _place_of_tile(inner: list[int], batch, head, q, k, number, *_):
    """On the grid of a bias' tiles and what is summed for each: one of every pair is 0, so the sum is the other."""
    heads, rows = inner[1:]
    further = quotient(number, heads * rows), remainder(quotient(number, rows), heads), remainder(number, rows)
    return batch + further[0], head + further[1], q + further[2], k


def _shards(plan: Plan, q, k, v) -> Shards:
    return Shards(rows_of(q, plan.q), rows_of(k, plan.k), rows_of(v, plan.k))


def _from_rows(x, plan: Plan, of_keys: bool = False):
    return jnp.swapaxes(out_of_blocks(x, 2, plan.k if of_keys else plan.q), 1, 2)


def _from_numbers(x, plan: Plan):
    return out_of_blocks(x[:, :, 0], 2, plan.q)


def _in_place(inputs, before, results) -> dict[int, int]:
    """The last leaves of ``inputs`` are ``before``: results of their type go to where they were."""
    first = len(jax.tree.leaves(inputs)) - len(jax.tree.leaves(before))
    last = len(results) - len(jax.tree.leaves(before))
    pairs = enumerate(jax.tree.leaves(before))
    return {first + i: last + i for i, x in pairs if x.dtype == results[last + i].dtype}


def _slope_gradient(dslopes, slopes):
    """``[batch, kv_heads, key blocks, group, q] -> [batch|1, heads]``"""
    dslopes = dslopes.sum((2, 4)).reshape(dslopes.shape[0], -1)
    return dslopes if slopes.shape[0] == dslopes.shape[0] else dslopes.sum(0, keepdims=True)


def _blocks(config: FwdParams) -> tuple[int, int]:
    return config.q_blocksize, config.kv_blocksize  # type: ignore[return-value]  # complete by now


def _fitting(config: FwdParams, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> tuple[int, int]:
    """The blocks, no longer than a run asks for."""
    runs = q_runs[0].length, k_runs[0].length
    q, k = (min(size, -(-length // LANES) * LANES) for size, length in zip(_blocks(config), runs, strict=True))
    return q, k
