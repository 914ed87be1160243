"""What the hierarchical ring needs."""

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    del forward, backward
    if len(problem.sizes) != 2:
        return f"it needs two mesh axes, the first between hosts and the second within a host; got {len(problem.sizes)}"
    return None
