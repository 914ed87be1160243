"""What strategies that run a kernel share: a pass over local shards, from its opening over the pairs of shards to its results.

A pair is this rank's queries and some keys that are here: their own shard, one that has arrived, or the whole sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import Grads, Kernel, Pair, Partial, Residuals, Runs, Sum, accumulation_dtype
from jax_core.kernels.merge import join_sinks, sink_gradient
from jax_core.operands import Keys, Operands
from jax_core.strategies.contract import RingSpec, extras_of, make_residuals
from jax_core.strategies.pairs.bias_slices import put_slice, take_slice
from jax_core.strategies.pairs.padding import clear_cotangents, clear_hidden, clear_operands, clear_values
from jax_core.strategies.pairs.rows import real_rows
from jax_core.strategies.pairs.shapes import SmallOperands, in_full_shape
from jax_core.strategies.transfers.transfer import Tree
from jax_core.varying import vary, varying_axes


def make_pair(
    spec: RingSpec, operands: Operands, q_runs: Runs, keys: Keys, k_runs: Runs, diagonal: bool = False, alone: bool = False
) -> Pair:
    """Of the queries and ``keys``, whose places in the sequence are ``k_runs``."""
    extras = extras_of(operands)._replace(
        bias=None if operands.bias is None else take_slice(operands.bias, k_runs),
        mask=None if operands.mask is None else take_slice(operands.mask, k_runs),
        kv_segment_ids=keys.segment_ids,
        kv_position_ids=keys.position_ids,
    )
    key, value = (clear_hidden(x, extras.mask) for x in (keys.key, keys.value))
    alone = alone or spec.problem.size == 1
    return Pair(operands.query, key, value, q_runs, k_runs, spec.problem.scores, extras, diagonal, spec.padding, alone)


class Forward(NamedTuple):
    """An opened forward. ``last_dtype``: of the output of the last pair; sinks join after it, and without sinks it is final."""

    spec: RingSpec
    operands: Operands
    wide: jnp.dtype
    last_dtype: jnp.dtype

    def attend(self, pair: Pair, carry: Partial | None, last: bool) -> Partial:
        return kernel_of(self.spec).forward(pair, carry, self.last_dtype if last else self.wide, self.spec.fwd_config)

    def close(self, result: Partial) -> tuple[Array, Array]:
        """``out`` and ``lse`` as the contract says, from the partial result over all keys."""
        if self.operands.softmax_aux is not None:
            result = join_sinks(result, self.operands.softmax_aux)
        return result.out.astype(self.operands.query.dtype), result.lse


def open_forward(spec: RingSpec, operands: Operands) -> Forward:
    operands, _ = in_full_shape(spec, clear_values(operands, real_rows(spec, operands)))
    wide, final = accumulation_dtype(operands.query.dtype), operands.query.dtype
    return Forward(spec, operands, wide, final if operands.softmax_aux is None else wide)


class LocalGradients(NamedTuple, Generic[Sum]):
    """Gradients that stay with the rank: the sums so far."""

    dq: Sum | None
    dbias: Array | None
    dalibi_slopes: Array | None


@dataclass(frozen=True)
class Backward:
    """An opened backward."""

    spec: RingSpec
    operands: Operands
    residuals: Residuals
    lse: Array
    to_given_shape: Callable[[SmallOperands], SmallOperands]

    def no_gradients(self) -> LocalGradients:
        """The initial sums; each pair writes its own columns of the bias gradient."""
        if self.operands.bias is None:
            return LocalGradients(None, None, None)
        zeros = jnp.zeros(self.operands.bias.shape, self.lse.dtype)
        return LocalGradients(None, vary(zeros, varying_axes(self.operands)), None)

    def differentiate(self, pair: Pair, dq: Sum | None) -> Grads[Sum]:
        return kernel_of(self.spec).backward(pair, self.residuals, dq, self.spec.bwd_config)

    def close(self, dkv: tuple[Sum, Sum], sums: LocalGradients[Sum], send_home: Callable[..., tuple[Array, Array]]) -> Operands:
        """The gradients as the contract says, from the sums over all pairs; ``dkv`` in the kernel's form, of the shard that came
        last. ``send_home`` takes dK and dV to the rank that owns it: nothing is added to them there, so they go rounded."""
        dq, dk, dv = kernel_of(self.spec).finish(self.operands[:3], (sums.dq, *dkv), self.spec.problem.scores)
        return self.gradients((dq, *send_home((dk, dv))), sums)

    def as_arrays(self, pair: Pair, grads: Grads) -> tuple[Array, Array, Array]:
        """dQ, dK and dV of the pair as arrays like its shards: in the accumulation dtype, or rounded to the operands' dtype by a
        kernel that has a form of its own."""
        arrays = grads.dq, grads.dk, grads.dv
        if all(isinstance(x, Array) for x in arrays):
            return arrays
        return kernel_of(self.spec).finish(pair.shards, arrays, pair.scores)

    def gradients(self, grads: tuple[Array, Array, Array], sums: LocalGradients) -> Operands:
        """The gradients as the contract says, from those of query, key and value in any dtype."""
        operands, sinks = self.operands, self.operands.softmax_aux
        dsinks = None if sinks is None else sink_gradient(sinks, self.lse, self.residuals.delta)
        small = self.to_given_shape(SmallOperands(dsinks, sums.dbias, sums.dalibi_slopes))
        query, key, value = (grad.astype(operand.dtype) for grad, operand in zip(grads, operands[:3], strict=True))
        nothing = jax.tree.map(lambda _: None, operands)
        return nothing._replace(query=query, key=key, value=value, **small._asdict())


def open_backward(spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None) -> Backward:
    real = real_rows(spec, operands)
    operands, to_given_shape = in_full_shape(spec, clear_operands(operands, real))
    dout, dlse = clear_cotangents(real, dout, dlse)
    residuals = make_residuals(out, lse, dout, dlse if spec.lse_gradient else None)
    return Backward(spec, operands, residuals, lse, to_given_shape)


def accumulate(sums: LocalGradients[Sum], grads: Grads[Sum], k_runs: Runs) -> LocalGradients[Sum]:
    dbias = None if sums.dbias is None else put_slice(sums.dbias, grads.dbias, k_runs)
    return LocalGradients(grads.dq, dbias, add(sums.dalibi_slopes, grads.dalibi_slopes))


def add(total: Tree | None, share: Tree) -> Tree:
    return share if total is None else jax.tree.map(jnp.add, total, share)


def kernel_of(spec: RingSpec) -> Kernel:
    assert spec.kernel is not None
    return spec.kernel
