"""Attention with no batch entry, no query or no key. Chosen automatically; rows that see no key follow the usual rule."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Partial, Problem, accumulation_dtype
from jax_core.kernels.merge import join_sinks, sinks_per_head
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy
from jax_core.strategies.transfers.traffic import Traffic
from jax_core.varying import vary, varying_axes


class Empty(Strategy):
    """Zeros."""

    CAPABILITIES = frozenset({"second_derivative"})  # nothing is computed, so no feature can be ignored

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        return None if 0 in (problem.batch, problem.q_length, problem.k_length) else "there is something to compute"

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        return Traffic(0, 0)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        del spec
        (batch, length, heads, _), dtype = operands.query.shape, accumulation_dtype(operands.query.dtype)
        out = jnp.zeros((batch, length, heads, operands.value.shape[-1]), dtype)
        result = Partial(out, jnp.full((batch, heads, length), -jnp.inf, dtype))
        if operands.softmax_aux is not None:
            result = join_sinks(result, sinks_per_head(operands.softmax_aux, heads))
        return vary((result.out.astype(operands.query.dtype), result.lse), varying_axes(operands))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        """Only sinks have a nonzero gradient, through the LSE."""
        del out, lse
        dlse = None if not spec.lse_gradient else dlse

        def results(sinks: Array | None) -> tuple[Array, Array]:
            return self.forward(spec, operands._replace(softmax_aux=sinks))

        (out, lse), transpose = jax.vjp(results, operands.softmax_aux)
        (dsinks,) = transpose((dout.astype(out.dtype), jnp.zeros_like(lse) if dlse is None else dlse))
        zeros = operands._replace(predicate_arrays=())
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None, zeros)
        none = jax.tree.map(lambda _: None, operands.predicate_arrays)
        return vary(zeros, varying_axes(operands))._replace(softmax_aux=dsinks, predicate_arrays=none)
