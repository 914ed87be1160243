"""Forward and backward. K/V and their ids are gathered, the kernel runs over them, and the gradients are sent back and summed.

Where a static mask shows a run of queries only its neighbourhood (``reach``), no more than that is sent: the edges of the
neighbouring runs.
"""

from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import Grads, Pair, Partial, Problem, Residuals
from jax_core.masks.layout import Run
from jax_core.masks.static import Mask
from jax_core.operands import Keys, Operands
from jax_core.strategies.all_gather.halo import add_halo, reduce_halo
from jax_core.strategies.all_gather.reach import Reach, bounded, reach
from jax_core.strategies.contract import RingSpec, Strategy
from jax_core.strategies.pairs.local import (
    Backward,
    accumulate,
    add,
    kernel_of,
    make_pair,
    open_backward,
    open_forward,
)
from jax_core.strategies.pairs.rows import query_runs
from jax_core.strategies.transfers.exchange import all_to_all, gather, in_sequence_order, in_shards
from jax_core.strategies.transfers.traffic import Traffic, sizes
from jax_core.strategies.transfers.transfer import tree_after

_WHOLE = frozenset("bias mask q_position_ids predicates".split())  # with these, keys are taken from the whole sequence


class AllGather(Strategy):
    """Every rank gets the keys that its queries may see, at once."""

    def kernel_problem(self, problem: Problem) -> Problem:
        """A shard of queries over all keys, or one run of queries over the keys in its window's reach."""
        lengths = problem.q_length, problem.k_length
        mask, features = bounded(problem.scores.mask, problem.size, lengths), problem.features
        if mask.keys is not None:
            features |= {"keys"}
        elif mask != Mask() and not mask.any_position and problem.q_length == problem.size * problem.k_length:
            features |= {"apart"}  # or a kernel that goes by lengths would take the keys for those at the queries' own positions
        asked = replace(problem, scores=replace(problem.scores, mask=mask), features=features)
        halo = _reach_of(problem)
        if halo is None:
            return replace(asked, k_length=problem.size * problem.k_length)
        return replace(
            asked,
            features=features - {problem.layout} | {"contiguous"},
            layout="contiguous",
            q_length=halo.run,
            k_length=halo.left + halo.run + halo.right,
        )

    def sends_halo_only(self, problem: Problem) -> bool:
        return self.kernel_problem(problem).k_length < problem.size * problem.k_length

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        halo, nbytes = _reach_of(problem), sizes(problem)
        each = nbytes.keys + (nbytes.sums if backward else 0)
        if halo is None:
            return Traffic((problem.size - 1) * each, problem.size * each)
        edges = each * (halo.left + halo.right) // halo.run
        return Traffic(edges, each + edges)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        halo = _reach(spec, operands)
        opened = open_forward(_bounded(spec, operands), operands)
        pairs = _pairs(opened.spec, opened.operands, opened.operands.keys, halo)
        results = [opened.attend(pair, None, last=True) for pair in pairs]
        out, lse = (jnp.concatenate(parts, axis) for parts, axis in zip(zip(*results, strict=True), (1, 2), strict=True))
        return opened.close(Partial(out, lse))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        halo = _reach(spec, operands)
        opened = open_backward(_bounded(spec, operands), operands, out, lse, dout, dlse)
        # K/V are gathered once more, and not before the forward is over: otherwise they would be kept from there until here.
        keys = tree_after(spec, opened.operands.keys, opened.residuals.delta)
        pairs = _pairs(opened.spec, opened.operands, keys, halo)
        sums, run_grads = opened.no_gradients(), []
        for i, pair in enumerate(pairs):
            grads: Grads = _of_run(opened, i, len(pairs)).differentiate(pair, None)
            run_grads.append(opened.as_arrays(pair, grads))
            sums = accumulate(sums, grads, pair.k_runs)
        dq = jnp.concatenate([query for query, *_ in run_grads], 1)
        dkv = [tuple(x.astype(lse.dtype) for x in pair) for _, *pair in run_grads]
        dk, dv = _summed(spec, reduce(add, dkv)) if halo is None else reduce_halo(spec, dkv, halo)
        return opened.gradients((dq, dk, dv), sums)


def _reach_of(problem: Problem) -> Reach | None:
    lengths, plain = (problem.q_length, problem.k_length), not problem.features & _WHOLE
    return reach(problem.scores.mask, problem.layout, problem.size, lengths, plain)


def _reach(spec: RingSpec, operands: Operands) -> Reach | None:
    whole = operands.bias, operands.mask, operands.q_position_ids
    plain = not spec.problem.scores.predicates and all(array is None for array in whole)
    lengths = operands.query.shape[1], operands.key.shape[1]
    return reach(spec.problem.scores.mask, spec.problem.layout, spec.problem.size, lengths, plain)


def _bounded(spec: RingSpec, operands: Operands) -> RingSpec:
    mask = bounded(spec.problem.scores.mask, spec.problem.size, (operands.query.shape[1], operands.key.shape[1]))
    return replace(spec, problem=replace(spec.problem, scores=replace(spec.problem.scores, mask=mask)))


def _pairs(spec: RingSpec, operands: Operands, keys: Keys, halo: Reach | None) -> list[Pair]:
    q_runs = query_runs(spec, operands)
    if halo is not None:
        beside = add_halo(spec, keys, halo)
        k_runs = [Run(run.start - halo.left, 1, halo.left + halo.run + halo.right) for run in q_runs]
        return [_of_queries(spec, operands, i, *pair) for i, pair in enumerate(zip(q_runs, beside, k_runs, strict=True))]
    keys = jax.tree.map(lambda x: in_sequence_order(x, spec.problem.layout), gather(spec, keys))
    whole = Run(0, 1, keys.key.shape[1])
    if _one_by_one(spec, operands):
        return [_of_queries(spec, operands, i, q_run, keys, whole) for i, q_run in enumerate(q_runs)]
    return [make_pair(spec, operands, q_runs, keys, (whole,), diagonal=True)]


def _one_by_one(spec: RingSpec, operands: Operands) -> bool:
    """Whether the kernel gets the two runs of a zigzag shard in a call each: one that works on rectangles knows where one run of
    queries ends among the keys, not where two do."""
    data = operands.bias, operands.mask, operands.q_segment_ids, operands.q_position_ids
    return not kernel_of(spec).CONTINUES and spec.problem.layout == "zigzag" and all(array is None for array in data)


def _of_queries(spec: RingSpec, operands: Operands, i: int, q_run: Run, keys: Keys, k_run: Run) -> Pair:
    """The ``i``-th run of queries and some keys; there is no array with a row for each query but the ids."""
    rows, ids = slice(i * q_run.length, (i + 1) * q_run.length), operands.q_segment_ids
    queries = operands._replace(query=operands.query[:, rows], q_segment_ids=None if ids is None else ids[:, rows])
    return make_pair(spec, queries, (q_run,), keys, (k_run,), diagonal=True)


def _of_run(opened: Backward, i: int, count: int) -> Backward:
    """With the statistics of the rows of the ``i``-th of ``count`` runs."""
    out, dout, lse, delta = opened.residuals
    run = out.shape[1] // count
    rows = slice(i * run, (i + 1) * run)
    return replace(opened, residuals=Residuals(out[:, rows], dout[:, rows], lse[..., rows], delta[..., rows]))


def _summed(spec: RingSpec, dkv: tuple[Array, ...]) -> tuple[Array, ...]:
    """This rank's shard of the sum over all ranks, added in the order of the ranks."""
    blocks = tuple(in_shards(x, spec.problem.layout, spec.problem.size) for x in dkv)
    return tuple(x.sum(0) for x in all_to_all(spec, blocks, spec.axis_name))
