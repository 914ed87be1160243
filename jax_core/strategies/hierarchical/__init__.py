"""A ring of hosts around rings of ranks: K/V go from host to host once, while they turn within each host."""

from jax_core.strategies.hierarchical.limits import unsupported
from jax_core.strategies.hierarchical.passes import backward, forward
from jax_core.strategies.limits import HANDLES, IN_PLACE_OF_A_KERNEL, OWN_PLATFORM, default_params, kernel_problem

__all__ = [
    "HANDLES",
    "IN_PLACE_OF_A_KERNEL",
    "OWN_PLATFORM",
    "backward",
    "default_params",
    "forward",
    "kernel_problem",
    "unsupported",
]
