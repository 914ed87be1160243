"""The kernels in Triton, for NVIDIA GPUs."""

from jax_core.kernels.triton.kernel import backward, default_params, forward, unsupported

__all__ = ["backward", "default_params", "forward", "unsupported"]
