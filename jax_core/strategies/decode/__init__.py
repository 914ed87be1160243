"""A few queries, the same on every rank, attend to keys and values that are spread over the ranks."""

from jax_core.strategies.decode.attention import backward, forward
from jax_core.strategies.decode.limits import HANDLES, IN_PLACE_OF_A_KERNEL, unsupported
from jax_core.strategies.limits import OWN_PLATFORM, default_params, kernel_problem

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
