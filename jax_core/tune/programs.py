"""What is compiled: a kernel's pass with some parameters, several times in a row, and the reference that its results must equal."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import xla
from jax_core.kernels.contract import Kernel, Problem, Residuals, config_of
from jax_core.tune.inputs import Inputs

Results = dict[str, Array]
Program = Callable[[], Results]
_SAMPLE_FLOP = 3e12  # some milliseconds of a GPU, so that the host's part of a call does not show
_MOST_CALLS = 64


class Reference(NamedTuple):
    """The results of the XLA kernel in float32 or wider, by pass and name; and what a backward in the problem's dtype
    starts from."""

    results: dict[str, Results]
    residuals: Residuals


def make_reference(problem: Problem, inputs: Inputs) -> Callable[[], Reference]:
    """Compiled; calling it computes."""
    wide = "float64" if problem.dtype == "float64" else "float32"
    exact_problem = replace(problem, dtype=wide)
    configs = xla.default_params(exact_problem)

    def compute(inputs: Inputs) -> Reference:
        exact = inputs.astype(wide)
        forward = _forward(xla, exact_problem, configs[0], exact, None)
        residuals = _residuals(forward, exact)
        rounded = _residuals({**forward, "out": forward["out"].astype(problem.dtype)}, inputs)
        backward = _backward(xla, exact_problem, configs[1], exact, residuals)
        return Reference({"forward": forward, "backward": backward}, rounded)

    # Trying out matrix products takes longer than computing once.
    options: dict[str, Any] | None = {"xla_gpu_autotune_level": 0} if problem.backend == "gpu" else None
    return partial(jax.jit(compute).lower(inputs).compile(options), inputs)


def make_program(kernel: Kernel, problem: Problem, params: FwdParams, inputs: Inputs, residuals: Residuals, calls: int) -> Program:
    """``calls`` passes one after another, compiled; the results are those of the last one."""
    once: Callable[[Inputs, Residuals], Results] = partial(_forward, kernel, problem, params)
    if isinstance(params, BwdParams):
        once = partial(_backward, kernel, problem, params)
    # As arguments: arrays that a program closes over are constants, copied by the host into every program.
    arrays = inputs, residuals
    return partial(jax.jit(partial(_in_a_row, once, calls)).lower(*arrays).compile(), *arrays)


def _in_a_row(once: Callable[[Inputs, Residuals], Results], calls: int, inputs: Inputs, residuals: Residuals) -> Results:
    def again(_: Array, state: tuple[Array, Results]) -> tuple[Array, Results]:
        q, results = state
        q, results = lax.optimization_barrier((q, results))  # else one call would do for all
        return q, once(inputs._replace(q=q), residuals)

    first = inputs.q, once(inputs, residuals)
    return first[1] if calls == 1 else lax.fori_loop(1, calls, again, first)[1]


def calls_per_sample(problem: Problem) -> int:
    """On a CPU a call is long enough."""
    if problem.backend == "cpu":
        return 1
    flop = 4 * problem.batch * problem.heads * _pairs(problem) * max(problem.dim, problem.value_dim)
    return max(1, min(_MOST_CALLS, round(_SAMPLE_FLOP / flop)))


def _pairs(problem: Problem) -> float:
    """About how many pairs of positions are visible."""
    mask, q, k = problem.scores.mask, problem.q_length, problem.k_length
    reach = [k / 2 if mask.causal else k]
    reach += [mask.left + (mask.right or 0) + 1] if mask.left is not None and (mask.causal or mask.right is not None) else []
    return q * max(1, min(reach))


def _forward(kernel: Kernel, problem: Problem, params: FwdParams, inputs: Inputs, residuals: Residuals | None) -> Results:
    del residuals  # a backward's
    return kernel.forward(inputs.pair(problem.scores), None, inputs.q.dtype, config_of(problem, params))._asdict()


def _backward(kernel: Kernel, problem: Problem, params: BwdParams, inputs: Inputs, residuals: Residuals) -> Results:
    grads = kernel.backward(inputs.pair(problem.scores), residuals, None, config_of(problem, params))
    dq, dk, dv = kernel.finish(inputs[:3], (grads.dq, grads.dk, grads.dv), problem.scores)
    grads = grads._replace(dq=dq, dk=dk, dv=dv)
    return {name: array for name, array in grads._asdict().items() if array is not None}


def _residuals(forward: Results, inputs: Inputs) -> Residuals:
    """As a strategy makes them (``strategies.contract``), without a cotangent of the LSE."""
    out, lse = forward["out"], forward["lse"]
    delta = jnp.swapaxes((out.astype(lse.dtype) * inputs.dout.astype(lse.dtype)).sum(-1), 1, 2)
    return Residuals(out, inputs.dout, jnp.where(jnp.isneginf(lse), jnp.inf, lse), delta)
