"""Every rank gets the keys and values that its queries may see, at once, and its kernel runs once over all of them."""

from jax_core.strategies.all_gather.limits import kernel_problem
from jax_core.strategies.all_gather.passes import backward, forward
from jax_core.strategies.limits import HANDLES, IN_PLACE_OF_A_KERNEL, OWN_PLATFORM, default_params, unsupported

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
