"""The smallest strategy under the contract: every rank gathers all keys and values and calls the kernel once. For tests only."""

import jax
from jax import lax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Extras, Problem, accumulation_dtype
from jax_core.masks.layout import Run
from jax_core.strategies.contract import Operands, RingSpec, make_residuals, same_problem

HANDLES = frozenset("contiguous causal float32 lse_gradient".split())
IN_PLACE_OF_A_KERNEL = frozenset({"contiguous"})
OWN_PLATFORM: str | None = None
kernel_problem = same_problem


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    return "it is for rings of two at least" if problem.size == 1 else None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    return FwdParams(), BwdParams()


def whole_sequence(spec: RingSpec, operands: Operands) -> tuple[tuple[jax.Array, ...], tuple[Run], tuple[Run]]:
    """All keys and values on every rank, and the positions of this rank's queries and of all keys."""
    key, value = (lax.all_gather(x, spec.axis_name, axis=1, tiled=True) for x in operands[1:3])
    length = operands.query.shape[1]
    return (key, value), (Run(lax.axis_index(spec.axis_name) * length, 1, length),), (Run(0, 1, key.shape[1]),)


def forward(spec: RingSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    assert spec.kernel is not None
    keys, q_runs, k_runs = whole_sequence(spec, operands)
    settings = dict(diagonal=False, scores=spec.scores, extras=Extras(), carry=None, config=spec.fwd_params)
    out, lse = spec.kernel.forward(
        operands.query, *keys, q_runs, k_runs, out_dtype=accumulation_dtype(operands.query.dtype), **settings
    )
    return out.astype(operands.query.dtype), lse


def backward(spec: RingSpec, operands: Operands, out, lse, dout, dlse=None) -> Operands:
    assert spec.kernel is not None
    keys, q_runs, k_runs = whole_sequence(spec, operands)
    residuals = make_residuals(out, lse, dout, dlse)
    settings = dict(
        diagonal=False, scores=spec.scores, extras=Extras(), dq=None, fused=False, deterministic=False, config=spec.bwd_params
    )
    grads = spec.kernel.backward(operands.query, *keys, residuals, q_runs, k_runs, **settings)
    dk, dv = (lax.psum_scatter(x, spec.axis_name, scatter_dimension=1, tiled=True) for x in (grads.dk, grads.dv))
    nothing = jax.tree.map(lambda _: None, operands)
    return nothing._replace(query=grads.dq, key=dk, value=dv)
