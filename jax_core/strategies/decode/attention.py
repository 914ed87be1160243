"""Attention of queries that all ranks hold to keys and values of which each rank holds a part, in any order.

Every rank attends to its own part; the partial results are joined once, in one collective (as in Shyam et al. 2024, "Tree
Attention", arXiv:2408.04093, whose three reductions are one gathering here: for a few queries the latency counts, not the bytes).
A rank sends ``batch * q_length * heads * (value_dim + 1)`` numbers in the accumulation dtype, however long the sequence is.

Each rank's output is that of the whole. Their cotangents add up, since a rank's keys are in the output of every rank; the gradient
of the query is this rank's part of the sum. Keys of a negative segment are empty places: they are never seen, but unlike the
padding of the other strategies their values must be finite in the forward. Clearing them would take longer than the attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, Pair, Partial, Problem, accumulation_dtype
from jax_core.kernels.merge import join_stacked, sink_gradient
from jax_core.masks.layout import Run
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy, extras_of, make_residuals
from jax_core.strategies.decode.arrangement import Arrangement, arrangement
from jax_core.strategies.pairs.local import Backward, Forward, kernel_of
from jax_core.strategies.pairs.padding import clear_cotangents, clear_operands
from jax_core.strategies.pairs.rows import real_rows
from jax_core.strategies.pairs.shapes import SmallOperands, in_full_shape
from jax_core.strategies.transfers.traffic import Traffic, sizes
from jax_core.strategies.transfers.transfer import collective
from jax_core.varying import vary, varying_axes

_BY_POSITION = frozenset("causal left right chunk alibi_slopes predicates".split())


class Decode(Strategy):
    """It handles what its kernel handles and needs no place of a rank's keys in the sequence."""

    DONE_BY_STRATEGY = frozenset("softmax_aux contiguous".split())
    CAPABILITIES = DONE_BY_STRATEGY | frozenset(
        "causal left right chunk any_position softcap predicates precision logits_dtype "
        "q_segment_ids kv_segment_ids q_position_ids kv_position_ids wide_ids alibi_slopes origin "
        "lse_gradient second_derivative fused_backward deterministic float16 bfloat16 float32 float64".split()
    )
    SHARED_QUERIES = True

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        if any(predicate.over == "index" for predicate in problem.scores.predicates):
            return "a mask_builder goes by the index of a key in the sequence, which a cache does not know; give a mask_mod"
        if problem.features & _BY_POSITION and "q_position_ids" not in problem.features:
            return (
                "the queries are the same on all ranks and the keys in any order, so causal masks, windows, chunks, ALiBi and "
                "mask_mod need q_position_ids and kv_position_ids"
            )
        return None

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        nbytes, size = sizes(problem), problem.size
        out = nbytes.rows * problem.value_dim
        if not backward:
            return Traffic((size - 1) * (out + nbytes.rows), size * (out + nbytes.rows) if size > 1 else 0)
        cotangents = out + (nbytes.rows if "lse_gradient" in problem.features else 0)
        return Traffic(2 * (size - 1) * cotangents // size, cotangents if size > 1 else 0)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        operands, _ = in_full_shape(spec, operands)
        arranged = arrangement(spec, operands)
        wide = accumulation_dtype(operands.query.dtype)
        opened = Forward(spec, operands, wide, wide)
        part = opened.attend(_pair(spec, arranged, operands), None, last=False)
        if arranged.parts > 1:
            part = join_stacked(Partial(*map(arranged.stacked, part)), wide)
        if spec.problem.size > 1:
            part = _joined_over_ranks(spec, part._replace(out=part.out.astype(wide)))
        return opened.close(Partial(arranged.out(part.out), arranged.lse(part.lse)))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        real = real_rows(spec, operands)
        operands, to_given_shape = in_full_shape(spec, clear_operands(operands, real))
        arranged = arrangement(spec, operands)
        dout, dlse = clear_cotangents(real, dout, dlse if spec.lse_gradient else None)
        residuals = make_residuals(out, lse, *_summed_over_ranks(spec, dout, dlse))
        residuals_of_rows = residuals._replace(
            out=arranged.rows(residuals.out),
            dout=arranged.rows(residuals.dout),
            lse=arranged.statistics(residuals.lse),
            delta=arranged.statistics(residuals.delta),
        )
        pair = _pair(spec, arranged, operands)
        opened = Backward(spec, operands, residuals_of_rows, lse, to_given_shape)
        grads: Grads = opened.differentiate(pair, None)
        query, key, value = kernel_of(spec).finish(pair.shards, (grads.dq, grads.dk, grads.dv), spec.problem.scores)
        # Every rank has the whole gradient of the sinks, which is to be its part of a sum.
        sinks, size = operands.softmax_aux, spec.problem.size
        dsinks = None if sinks is None else sink_gradient(sinks, lse, residuals.delta) / size
        small = to_given_shape(SmallOperands(dsinks, None, arranged.slopes_gradient(grads.dalibi_slopes, operands.alibi_slopes)))
        nothing = jax.tree.map(lambda _: None, operands)
        query = arranged.out(arranged.stacked(query).sum(0))
        return nothing._replace(query=query, key=arranged.shard(key), value=arranged.shard(value), **small._asdict())


def _pair(spec: RingSpec, arranged: Arrangement, operands: Operands) -> Pair:
    """Nothing reads the runs as positions: without position ids no mask depends on positions."""
    q, k, v = arranged.rows(operands.query), arranged.keys(operands.key), arranged.keys(operands.value)
    extras = extras_of(operands)._replace(
        q_segment_ids=arranged.row_ids(operands.q_segment_ids),
        kv_segment_ids=arranged.key_ids(operands.kv_segment_ids),
        q_position_ids=arranged.row_ids(operands.q_position_ids),
        kv_position_ids=arranged.key_ids(operands.kv_position_ids),
        alibi_slopes=arranged.of_entries(operands.alibi_slopes),
        dropout_seed=None,
    )
    return Pair(q, k, v, (Run(0, 1, q.shape[1]),), (Run(0, 1, k.shape[1]),), spec.problem.scores, extras)


def _joined_over_ranks(spec: RingSpec, part: Partial) -> Partial:
    """Output and LSE travel in one buffer."""
    lse = jnp.swapaxes(part.lse, 1, 2)[..., None].astype(part.out.dtype)
    gathered = collective(partial(lax.all_gather, axis_name=spec.axis_name), jnp.concatenate([part.out, lse], axis=-1))
    return join_stacked(Partial(gathered[..., :-1], jnp.swapaxes(gathered[..., -1], 2, 3)), part.out.dtype)


def _summed_over_ranks(spec: RingSpec, dout: Array, dlse: Array | None) -> tuple[Array, Array | None]:
    if spec.problem.size == 1:
        return dout, dlse
    cotangents = dout.astype(accumulation_dtype(dout.dtype)), dlse
    axes = varying_axes(cotangents)
    return vary(lax.psum(cotangents, spec.axis_name), axes)
