"""The smallest strategy under the contract: every rank gathers all keys and values and calls the kernel once. For tests only."""

import jax
from jax import lax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Pair, Problem, accumulation_dtype
from jax_core.masks.layout import Run
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy, make_residuals
from jax_core.strategies.transfers.traffic import Traffic, sizes


def whole_sequence(spec: RingSpec, operands: Operands) -> Pair:
    """This rank's queries, and all keys and values on every rank."""
    key, value = (lax.all_gather(x, spec.axis_name, axis=1, tiled=True) for x in operands[1:3])
    length = operands.query.shape[1]
    q_run, k_run = Run(lax.axis_index(spec.axis_name) * length, 1, length), Run(0, 1, key.shape[1])
    return Pair(operands.query, key, value, (q_run,), (k_run,), spec.problem.scores)


class Toy(Strategy):
    CAPABILITIES = frozenset("contiguous causal float32 lse_gradient".split())
    DONE_BY_STRATEGY = frozenset({"contiguous"})

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        return "it is for rings of two at least" if problem.size == 1 else None

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        return Traffic((problem.size - 1) * sizes(problem).keys, problem.size * sizes(problem).keys)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        assert spec.kernel is not None
        wide = accumulation_dtype(operands.query.dtype)
        out, lse = spec.kernel.forward(whole_sequence(spec, operands), None, wide, spec.fwd_config)
        return out.astype(operands.query.dtype), lse

    def backward(self, spec: RingSpec, operands: Operands, out, lse, dout, dlse=None) -> Operands:
        assert spec.kernel is not None
        pair, residuals = whole_sequence(spec, operands), make_residuals(out, lse, dout, dlse)
        grads = spec.kernel.backward(pair, residuals, None, spec.bwd_config)
        dk, dv = (lax.psum_scatter(x, spec.axis_name, scatter_dimension=1, tiled=True) for x in (grads.dk, grads.dv))
        nothing = jax.tree.map(lambda _: None, operands)
        return nothing._replace(query=grads.dq, key=dk, value=dv)
