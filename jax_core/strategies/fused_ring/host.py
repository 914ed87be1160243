"""The fused strategy outside its kernels: it cuts shards into padded halves, and joins the sinks after the last step."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import tpu
from jax_core.kernels.contract import Partial, Problem
from jax_core.kernels.merge import join_sinks, sink_gradient, sinks_per_head
from jax_core.kernels.tpu.params import block_sizes, fitting, params_reason, problem_reason
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy, make_residuals
from jax_core.strategies.fused_ring.constants import SLOTS, HalvedShard, RingConstants, Shards, halved, route
from jax_core.strategies.pairs.padding import clear_cotangents, clear_operands, clear_values
from jax_core.strategies.pairs.rows import real_rows
from jax_core.strategies.transfers.traffic import Traffic, sizes


class FusedRing(Strategy):
    """The ring fused into one Pallas kernel, for TPUs."""

    FIXED_PLATFORM = "pallas"
    EXPERIMENTAL = tpu.EXPERIMENTAL
    CAPABILITIES = frozenset(
        "causal left right chunk softcap precision q_segment_ids kv_segment_ids softmax_aux lse_gradient bfloat16 float32 "
        "contiguous zigzag striped".split()
    )
    DONE_BY_STRATEGY = CAPABILITIES

    def default_params(self, problem: Problem) -> tuple[FwdParams, BwdParams]:
        """Tiles of 512 x 512 and, in the backward, 256 x 512; smaller where half a shard is shorter."""
        q, k = -(-problem.q_length // 2), -(-problem.k_length // 2)
        return FwdParams(fitting(512, q), fitting(512, k)), BwdParams(fitting(256, q), fitting(512, k))

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        reason = _ring_reason(problem) or problem_reason(problem) or tpu.params.missing(problem.backend)
        return reason or params_reason("fwd_params", forward) or params_reason("bwd_params", backward)

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        """Both slots of K/V; in the backward those of their sums, and room for what comes home."""
        nbytes, lengths = sizes(problem), (problem.q_length, problem.k_length)
        _, hops = route(problem.scores.mask, problem.layout, problem.size, *lengths)
        sums = (hops + 1, 3) if backward else (0, 0)
        return Traffic(hops * nbytes.keys + sums[0] * nbytes.sums, 2 * nbytes.keys + sums[1] * nbytes.sums)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        from jax_core.strategies.fused_ring import forward_kernel  # loads Pallas for TPUs

        operands = clear_values(operands, real_rows(spec, operands))
        const = make_constants(spec, operands, spec.fwd_config.params)
        out, lse = forward_kernel.forward(const, _rank(spec), _shards(const, operands))
        part = Partial(_whole(const.q, out).transpose(0, 3, 1, 2), _whole(const.q, lse)[:, :, 0])
        if operands.softmax_aux is not None:
            part = join_sinks(part, sinks_per_head(operands.softmax_aux, const.heads))
        return part.out.astype(operands.query.dtype), part.lse

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        from jax_core.strategies.fused_ring import backward_kernel

        real = real_rows(spec, operands)
        operands, (dout, dlse) = clear_operands(operands, real), clear_cotangents(real, dout, dlse)
        const = make_constants(spec, operands, spec.bwd_config.params)
        residuals = make_residuals(out, lse, dout, dlse if spec.lse_gradient else None)
        blocked = backward_kernel.BlockedResiduals(
            _in_blocks(const.q, residuals.dout.transpose(0, 2, 1, 3), 2),
            _in_blocks(const.q, residuals.lse[:, :, None], 3, fill=jnp.inf),  # rows that pad a block have weights exp(-inf) = 0
            _in_blocks(const.q, residuals.delta[:, :, None], 3),
        )
        grads = backward_kernel.backward(const, _rank(spec), _shards(const, operands), blocked)
        dquery = spec.problem.scores.scale * _whole(const.q, grads.query).transpose(0, 3, 1, 2)
        dkey, dvalue = (_out_of_halves(const.k, x) for x in (spec.problem.scores.scale * grads.key, grads.value))
        query, key, value = (x.astype(operand.dtype) for x, operand in zip((dquery, dkey, dvalue), operands[:3], strict=True))
        nothing = jax.tree.map(lambda _: None, operands)
        return nothing._replace(query=query, key=key, value=value, softmax_aux=_dsinks(operands, lse, residuals.delta))


def _ring_reason(problem: Problem) -> str | None:
    if problem.size == 1:
        return "a ring of one rank sends nothing"
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        return "it counts in 32 bits, also segment ids, and JAX's 64-bit mode is on; leave jax_enable_x64 off"
    _, hops = route(problem.scores.mask, problem.layout, problem.size, problem.q_length, problem.k_length)
    return None if hops else "no rank sees another's keys under this mask, so there is nothing to send"


def _rank(spec: RingSpec) -> Array:
    assert spec.axis_name is not None  # a ring of one rank is refused
    return lax.axis_index(spec.axis_name)


def _dsinks(operands: Operands, lse: Array, delta: Array) -> Array | None:
    if operands.softmax_aux is None:
        return None
    sinks, transpose = jax.vjp(lambda given: sinks_per_head(given, operands.query.shape[2]), operands.softmax_aux)
    (dsinks,) = transpose(sink_gradient(sinks, lse, delta).astype(sinks.dtype))
    return dsinks


def make_constants(spec: RingSpec, operands: Operands, params: FwdParams) -> RingConstants:
    query, key, value = operands[:3]
    assert spec.axis_name is not None
    axes = (spec.axis_name,) if isinstance(spec.axis_name, str) else spec.axis_name
    lengths, (q_block, k_block) = (query.shape[1], key.shape[1]), block_sizes(params)
    directions, hops = route(spec.problem.scores.mask, spec.problem.layout, spec.problem.size, *lengths)
    return RingConstants(
        q=halved(spec.problem.layout, spec.problem.size, lengths[0], q_block),
        k=halved(spec.problem.layout, spec.problem.size, lengths[1], k_block),
        batch=query.shape[0],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        dim=query.shape[3],
        value_dim=value.shape[3],
        layout=spec.problem.layout,
        axes=tuple((axis, lax.axis_size(axis)) for axis in axes),
        directions=directions,
        hops=hops,
        scores=spec.problem.scores,
        segments=operands.q_segment_ids is not None,
    )


def _shards(const: RingConstants, operands: Operands) -> Shards:
    q_segments, k_segments = None, None
    if const.segments:
        assert operands.q_segment_ids is not None and operands.kv_segment_ids is not None
        q_ids, k_ids = (_rows_of_ids(ids, const.batch) for ids in (operands.q_segment_ids, operands.kv_segment_ids))
        q_segments, k_segments = _in_blocks(const.q, q_ids, 2), _in_slots(const.k, k_ids, 2)
    query, key, value = (x.transpose(0, 2, 1, 3) for x in operands[:3])
    return Shards(_in_blocks(const.q, query, 2), _in_slots(const.k, key, 2), _in_slots(const.k, value, 2), q_segments, k_segments)


def _rows_of_ids(ids: Array, batch: int) -> Array:
    """``[length]`` or ``[batch|1, length] -> [batch, 1, length]``"""
    ids = jnp.atleast_2d(ids).astype(jnp.int32)
    return jnp.broadcast_to(ids, (batch, ids.shape[-1]))[:, None]


def _padded_halves(shard: HalvedShard, x: Array, axis: int, fill: float = 0) -> list[Array]:
    halves = jnp.split(x, [shard.lengths[0]], axis)
    widths = [[(0, shard.padded - half.shape[axis] if i == axis else 0) for i in range(x.ndim)] for half in halves]
    return [jnp.pad(half, width, constant_values=fill) for half, width in zip(halves, widths, strict=True)]


def _in_blocks(shard: HalvedShard, x: Array, axis: int, fill: float = 0) -> Array:
    """Both halves along ``axis``, each padded to whole blocks."""
    return jnp.concatenate(_padded_halves(shard, x, axis, fill), axis)


def _in_slots(shard: HalvedShard, x: Array, axis: int) -> Array:
    """``[2, SLOTS, ...]``: each half padded to whole blocks, in the first of its slots."""
    first = jnp.stack(_padded_halves(shard, x, axis))[:, None]
    return jnp.pad(first, [(0, 0), (0, SLOTS - 1)] + [(0, 0)] * x.ndim)


def _out_of_halves(shard: HalvedShard, x: Array) -> Array:
    """``[2, batch, heads, positions of a half, dim] -> [batch, positions, heads, dim]``, without the padding."""
    first, second = (x[half, :, :, :length] for half, length in enumerate(shard.lengths))
    return jnp.concatenate([first, second], 2).transpose(0, 2, 1, 3)


def _whole(shard: HalvedShard, x: Array) -> Array:
    """The inverse of :func:`_in_blocks` along the last axis."""
    first, second = x[..., : shard.lengths[0]], x[..., shard.padded : shard.padded + shard.lengths[1]]
    return jnp.concatenate([first, second], -1)
