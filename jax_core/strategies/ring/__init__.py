"""The ring: K/V travel from rank to rank between kernel calls."""

from jax_core.strategies.limits import HANDLES, IN_PLACE_OF_A_KERNEL, OWN_PLATFORM, default_params, kernel_problem, unsupported
from jax_core.strategies.ring.loop import backward, forward

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
