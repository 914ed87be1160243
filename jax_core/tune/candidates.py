"""What a search tries: the parameters that a kernel lists and can run."""

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Kernel, Problem

Candidates = tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]


def candidates(kernel: Kernel, problem: Problem) -> Candidates:
    """Those that its ``configs(problem)`` lists for the forward and for the backward, without those that it refuses; none for a
    kernel without ``configs``, whose parameters are not the caller's to choose."""
    configs = getattr(kernel, "configs", None)
    if configs is None:
        return (), ()
    forward, backward = configs(problem)
    return _running(kernel, problem, forward), _running(kernel, problem, backward)


def as_pair(kernel: Kernel, problem: Problem, params: FwdParams) -> tuple[FwdParams, BwdParams]:
    """With the kernel's own choice for the other pass."""
    forward, backward = kernel.default_params(problem)
    return (forward, params) if isinstance(params, BwdParams) else (params, backward)


def _running(kernel, problem, listed):
    return tuple(
        params for params in dict.fromkeys(listed) if kernel.unsupported(problem, *as_pair(kernel, problem, params)) is None
    )
