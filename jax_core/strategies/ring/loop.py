"""The ring: exact attention over local shards inside ``shard_map``, written once for every kernel.

Each rank keeps its queries; K/V rotate round the ring (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers",
arXiv:2310.01889), and every step continues the online softmax. In the backward K/V rotate again, and their gradients follow one
step behind until they are back at the rank that owns the shard.
"""

from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import Extras, Grads, Kernel, Partial, accumulation_dtype
from jax_core.kernels.merge import join, join_sinks, sink_gradient
from jax_core.masks.layout import Run, runs
from jax_core.strategies.contract import Operands, RingSpec, make_residuals
from jax_core.strategies.padding import clear_cotangents, clear_hidden, clear_operands, clear_values
from jax_core.strategies.ring.columns import put_columns, take_columns
from jax_core.strategies.ring.schedule import Step, steps, visible_shifts
from jax_core.strategies.ring.transfer import Transfer, finish_transfers, ordered_after, pack, start_transfers, unpack, wire_dtype
from jax_core.strategies.shapes import SmallOperands, in_full_shape
from jax_core.varying import vary, varying_axes


def forward(spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
    """As the contract says."""
    kernel = _kernel(spec)
    operands, _ = in_full_shape(spec, clear_values(operands))
    local_kv, plan = _kv_shard(operands), _plan(spec, operands)
    # Sinks join after the last step; without sinks the last step writes the output in its final dtype.
    wide, final = accumulation_dtype(operands.query.dtype), operands.query.dtype
    last_dtype = final if operands.softmax_aux is None else wide

    def run_step(state, step: Step):
        buffer, shift, (carry, apart) = state
        transfers = [Transfer(buffer, step.hop_out)] if step.hop_out else []
        arriving = start_transfers(transfers, spec.axis_name, spec.size)
        shards, extras = _step_inputs(spec, operands, unpack(buffer, local_kv) if step.hop_in else local_kv, shift)
        result = kernel.forward(
            *shards,
            diagonal=not step.hop_in,
            scores=spec.scores,
            extras=extras,
            carry=carry if kernel.CONTINUES else None,
            out_dtype=wide if step.hop_out else last_dtype,
            config=spec.fwd_params,
        )
        if transfers:
            arriving, result = lax.optimization_barrier((arriving, result))
        found = _Found(result, ()) if kernel.CONTINUES else _joined(_Found(carry, (*apart, result)), wide, _MOST_APART)
        return *(finish_transfers(arriving, transfers) or [buffer]), shift + step.hop_out, found

    def settle(state):
        buffer, shift, found = state
        return buffer, shift, _joined(found, wide)

    buffer = pack(local_kv, _wire_dtype(spec, operands)) if len(plan) > 1 else None
    *_, found = _run_steps(spec, run_step, settle, (buffer, jnp.int32(0), _Found(None, ())), plan)
    result = _only(_joined(found, last_dtype))
    if operands.softmax_aux is not None:
        result = join_sinks(result, operands.softmax_aux)
    return result.out.astype(final), result.lse


def backward(spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None) -> Operands:
    """As the contract says."""
    kernel = _kernel(spec)
    operands, to_given_shape = in_full_shape(spec, clear_operands(operands))
    dout, dlse = clear_cotangents(operands, dout, dlse)
    residuals = make_residuals(out, lse, dout, dlse if spec.lse_gradient else None)
    local_kv, word, plan = _kv_shard(operands), _wire_dtype(spec, operands), _plan(spec, operands)

    def run_step(state, step: Step):
        buffer, shift, dkv, sums = state
        # In flight during this step: K/V for the next step, and the previous step's dK/dV, which this step's are added to.
        transfers = [Transfer(buffer, step.hop_out)] if step.hop_out else []
        transfers += [Transfer(pack(dkv, word), step.hop_in)] if step.hop_in else []
        arriving = start_transfers(transfers, spec.axis_name, spec.size)
        (q, k, v, q_runs, k_runs), extras = _step_inputs(
            spec, operands, unpack(buffer, local_kv) if step.hop_in else local_kv, shift
        )
        grads = kernel.backward(
            q,
            k,
            v,
            residuals,
            q_runs,
            k_runs,
            diagonal=not step.hop_in,
            scores=spec.scores,
            extras=extras,
            dq=sums.dq,
            fused=spec.fused_backward,
            deterministic=spec.deterministic,
            config=spec.bwd_params,
        )
        if transfers:
            arriving, grads = lax.optimization_barrier((arriving, grads))
        arrived = finish_transfers(arriving, transfers)
        dkv = _add(unpack(arrived[-1], dkv) if step.hop_in else None, (grads.dk, grads.dv))
        return arrived[0] if step.hop_out else buffer, shift + step.hop_out, dkv, _accumulate(sums, grads, k_runs)

    # The first rotation must not run alongside the forward's, nor be merged with it, which would keep its result alive until now.
    buffer = ordered_after(pack(local_kv, word), residuals.delta) if len(plan) > 1 else None
    state = buffer, jnp.int32(0), None, _no_gradients(operands, lse.dtype)
    _, _, dkv, sums = _run_steps(spec, run_step, lambda state: state, state, plan)
    dk, dv = _return_to_owner(spec, dkv, word, sum(step.hop_out for step in plan))
    dsinks = None if operands.softmax_aux is None else sink_gradient(operands.softmax_aux, lse, residuals.delta)
    small = to_given_shape(SmallOperands(dsinks, sums.dbias, sums.dalibi_slopes))
    query, key, value = kernel.finish(operands[:3], (sums.dq, dk, dv), spec.scores)
    nothing = jax.tree.map(lambda _: None, operands)
    return nothing._replace(query=query, key=key, value=value, **small._asdict())


def _kernel(spec: RingSpec) -> Kernel:
    assert spec.kernel is not None
    return spec.kernel


class _KVShard(NamedTuple):
    """What is sent for a shard of keys."""

    key: Array
    value: Array
    segment_ids: Array | None
    position_ids: Array | None


def _kv_shard(operands: Operands) -> _KVShard:
    return _KVShard(operands.key, operands.value, operands.kv_segment_ids, operands.kv_position_ids)


def _wire_dtype(spec: RingSpec, operands: Operands) -> type | None:
    return wire_dtype(operands.key.dtype, packed=spec.backend == "cpu")


def _plan(spec: RingSpec, operands: Operands) -> list[Step]:
    if operands.q_position_ids is not None:
        return steps(tuple(range(spec.size)))  # positions are data: any shard may be seen
    return steps(visible_shifts(spec.scores.mask, spec.layout, spec.size, operands.query.shape[1], operands.key.shape[1]))


class _Found(NamedTuple):
    """The result so far: a partial, and those of later pairs that have not been joined to it."""

    carry: Partial | None
    apart: tuple[Partial, ...]


_MOST_APART = 4  # a partial is an output in 16 bits


def _joined(found: _Found, dtype, from_count: int = 1) -> _Found:
    """With everything in ``carry``, its output in ``dtype``, unless fewer than ``from_count`` partials are apart."""
    if len(found.apart) < from_count:
        return found
    first, *others = found.apart if found.carry is None else (found.carry, *found.apart)
    return _Found(join([first, *others], dtype) if others else first._replace(out=first.out.astype(dtype)), ())


def _only(found: _Found) -> Partial:
    assert found.carry is not None and not found.apart
    return found.carry


def _run_steps(spec: RingSpec, run_step, settle, state, plan: list[Step]):
    """The state after all steps. Consecutive equal steps (all but the first and the last, if there are no gaps) are one loop: XLA
    then cannot run all rotations before the kernels, which would overlap nothing and hold every shard at once, and the program does
    not grow with the ring. ``settle`` gives a state the form that it has at the end of the loop's body."""
    for step, equal in groupby(plan):
        state = _repeat(partial(run_step, step=step), settle, state, len(list(equal)), unroll=1 if spec.backend == "cpu" else 2)
    return state


def _repeat(run_step, settle, state, count: int, unroll: int):
    """``unroll``: with two steps in the body, two buffers alternate; with one, arrivals are copied to where the next step reads."""
    outside = count if count <= unroll else count % unroll
    for _ in range(outside):
        state = run_step(state)
    if count == outside:
        return state

    def body(state, _):
        for _ in range(unroll):
            state = run_step(state)
        return settle(state), None

    return lax.scan(body, settle(state), length=(count - outside) // unroll)[0]


def _step_inputs(spec: RingSpec, operands: Operands, here: _KVShard, shift):
    """The kernel's positional arguments ``(q, k, v, q_runs, k_runs)`` and extras, for K/V from ``shift`` ranks before this one."""
    rank = _rank(spec, operands)
    q_runs = runs(spec.layout, rank, spec.size, operands.query.shape[1])
    k_runs = runs(spec.layout, (rank - shift) % spec.size, spec.size, here.key.shape[1])
    extras = Extras(
        bias=None if operands.bias is None else take_columns(operands.bias, k_runs),
        mask=None if operands.mask is None else take_columns(operands.mask, k_runs),
        q_segment_ids=operands.q_segment_ids,
        kv_segment_ids=here.segment_ids,
        q_position_ids=operands.q_position_ids,
        kv_position_ids=here.position_ids,
        alibi_slopes=operands.alibi_slopes,
        dropout_seed=operands.dropout_seed,
        origin=operands.origin,
        predicate_arrays=operands.predicate_arrays,
    )
    key, value = (clear_hidden(x, extras.mask) for x in (here.key, here.value))
    return (operands.query, key, value, q_runs, k_runs), extras


def _rank(spec: RingSpec, operands: Operands):
    if spec.size == 1:
        return 0
    return lax.axis_index(spec.axis_name) if operands.rank is None else operands.rank[0]


class _LocalGradients(NamedTuple):
    """Gradients that stay with the rank."""

    dq: Array | None
    dbias: Array | None
    dalibi_slopes: Array | None


def _no_gradients(operands: Operands, dtype) -> _LocalGradients:
    """The initial state; each step writes its own columns of the bias gradient."""
    if operands.bias is None:
        return _LocalGradients(None, None, None)
    return _LocalGradients(None, vary(jnp.zeros(operands.bias.shape, dtype), varying_axes(operands)), None)


def _accumulate(sums: _LocalGradients, grads: Grads, k_runs: tuple[Run, ...]) -> _LocalGradients:
    dbias = None if sums.dbias is None else put_columns(sums.dbias, grads.dbias, k_runs)
    return _LocalGradients(grads.dq, dbias, _add(sums.dalibi_slopes, grads.dalibi_slopes))


def _add(total, share):
    return share if total is None else jax.tree.map(jnp.add, total, share)


def _return_to_owner(spec: RingSpec, dkv, word: type | None, sent: int):
    """dK and dV of this rank's own shard, which are ``size - sent`` hops away from it."""
    if not sent:
        return dkv
    transfers = [Transfer(pack(dkv, word), spec.size - sent)]
    (buffer,) = finish_transfers(start_transfers(transfers, spec.axis_name, spec.size), transfers)
    return unpack(buffer, dkv)
