"""The fused strategy: the ring inside one kernel, which sends K/V to its neighbours while it computes (TPU)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_core.config import FwdParams
from jax_core.kernels.contract import Partial
from jax_core.kernels.merge import join_sinks, sink_gradient, sinks_per_head
from jax_core.strategies.contract import Operands, RingSpec, row_delta
from jax_core.strategies.fused_ring.plan import SLOTS, Plan, Shards, Side, journey, side


def forward(spec: RingSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """As the contract says."""
    from jax_core.strategies.fused_ring.forward_kernel import forward as run

    plan = make_plan(spec, operands, spec.fwd_params)
    out, lse = run(plan, lax.axis_index(spec.axis_name), _shards(plan, operands), spec.backend == "cpu")
    found = Partial(_whole(plan.q, out).transpose(0, 3, 1, 2), _whole(plan.q, lse)[:, :, 0])
    if operands.softmax_aux is not None:
        found = join_sinks(found, sinks_per_head(operands.softmax_aux, plan.heads))
    return found.out.astype(operands.query.dtype), found.lse


def backward(spec: RingSpec, operands: Operands, out, lse, dout, dlse=None) -> Operands:
    """As the contract says."""
    from jax_core.strategies.fused_ring.backward_kernel import Rows
    from jax_core.strategies.fused_ring.backward_kernel import backward as run

    plan = make_plan(spec, operands, spec.bwd_params)
    delta = row_delta(out, lse, dout, dlse if spec.lse_gradient else None)
    # exp(x - inf) is 0: no weight where a row saw nothing, nor where rows are padding.
    rows = Rows(
        _in_blocks(plan.q, dout.astype(operands.query.dtype).transpose(0, 2, 1, 3), 2),
        _in_blocks(plan.q, jnp.where(jnp.isneginf(lse), jnp.inf, lse)[:, :, None], 3, fill=jnp.inf),
        _in_blocks(plan.q, delta[:, :, None], 3),
    )
    found = run(plan, lax.axis_index(spec.axis_name), _shards(plan, operands), rows, spec.backend == "cpu")
    dquery = spec.scores.scale * _whole(plan.q, found.query).transpose(0, 3, 1, 2)
    dkey, dvalue = (_from_travel(plan.k, x) for x in (spec.scores.scale * found.key, found.value))
    grads = (x.astype(operand.dtype) for x, operand in zip((dquery, dkey, dvalue), operands[:3], strict=True))
    nothing = jax.tree.map(lambda _: None, operands)
    return nothing._replace(**dict(zip(("query", "key", "value"), grads, strict=True)), softmax_aux=_dsinks(operands, lse, delta))


def _dsinks(operands: Operands, lse, delta):
    if operands.softmax_aux is None:
        return None
    sinks, transpose = jax.vjp(lambda given: sinks_per_head(given, operands.query.shape[2]), operands.softmax_aux)
    (found,) = transpose(sink_gradient(sinks, lse, delta).astype(sinks.dtype))
    return found


def make_plan(spec: RingSpec, operands: Operands, params: FwdParams) -> Plan:
    query, key, value = operands[:3]
    axes: Any = spec.axis_name if isinstance(spec.axis_name, tuple) else (spec.axis_name,)
    assert params.q_blocksize is not None and params.kv_blocksize is not None
    lengths = query.shape[1], key.shape[1]
    directions, hops = journey(spec.scores.mask, spec.layout, spec.size, *lengths)
    return Plan(
        q=side(spec.layout, spec.size, lengths[0], params.q_blocksize),
        k=side(spec.layout, spec.size, lengths[1], params.kv_blocksize),
        batch=query.shape[0],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        dim=query.shape[3],
        value_dim=value.shape[3],
        layout=spec.layout,
        axes=tuple((axis, lax.axis_size(axis)) for axis in axes),
        directions=directions,
        hops=hops,
        scores=spec.scores,
        segments=operands.q_segment_ids is not None,
    )


def _shards(plan: Plan, operands: Operands) -> Shards:
    segments = dict.fromkeys(("q_segments", "k_segments"))
    if plan.segments:
        q_ids, k_ids = (_rows_of_ids(ids, plan.batch) for ids in (operands.q_segment_ids, operands.kv_segment_ids))
        segments = dict(q_segments=_in_blocks(plan.q, q_ids, 2), k_segments=_to_travel(plan.k, k_ids, 2))
    query, key, value = (x.transpose(0, 2, 1, 3) for x in operands[:3])
    return Shards(_in_blocks(plan.q, query, 2), _to_travel(plan.k, key, 2), _to_travel(plan.k, value, 2), **segments)


def _rows_of_ids(ids, batch: int):
    ids = jnp.atleast_2d(ids).astype(jnp.int32)
    return jnp.broadcast_to(ids, (batch, ids.shape[-1]))[:, None]


def _padded_halves(side: Side, x, axis: int, fill=0) -> list:
    halves = jnp.split(x, [side.lengths[0]], axis)
    widths = [[(0, side.padded - half.shape[axis] if i == axis else 0) for i in range(x.ndim)] for half in halves]
    return [jnp.pad(half, width, constant_values=fill) for half, width in zip(halves, widths, strict=True)]


def _in_blocks(side: Side, x, axis: int, fill=0):
    """Both halves along ``axis``, each padded to whole blocks."""
    return jnp.concatenate(_padded_halves(side, x, axis, fill), axis)


def _to_travel(side: Side, x, axis: int):
    """``[2, SLOTS, ...]``: each half padded to whole blocks, in the first of its places."""
    own = jnp.stack(_padded_halves(side, x, axis))[:, None]
    return jnp.pad(own, [(0, 0), (0, SLOTS - 1)] + [(0, 0)] * x.ndim)


def _from_travel(side: Side, x):
    """``[2, batch, heads, positions of a half, dim] -> [batch, positions, heads, dim]``, without the padding."""
    first, second = (x[half, :, :, :length] for half, length in enumerate(side.lengths))
    return jnp.concatenate([first, second], 2).transpose(0, 2, 1, 3)


def _whole(side: Side, x):
    """The inverse of :func:`_in_blocks` along the last axis."""
    first, second = x[..., : side.lengths[0]], x[..., side.padded : side.padded + side.lengths[1]]
    return jnp.concatenate([first, second], -1)
