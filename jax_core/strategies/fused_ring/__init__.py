"""The ring fused into one Pallas kernel, for TPUs."""

from jax_core.strategies.fused_ring.host import backward, forward
from jax_core.strategies.fused_ring.limits import (
    HANDLES,
    IN_PLACE_OF_A_KERNEL,
    OWN_PLATFORM,
    default_params,
    kernel_problem,
    unsupported,
)

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
