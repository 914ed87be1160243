"""The kernels in Pallas, for TPUs."""

from jax_core.kernels.pallas.kernel import backward, default_params, forward, unsupported

__all__ = ["backward", "default_params", "forward", "unsupported"]
