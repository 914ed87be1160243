"""The kernels in Triton, for NVIDIA GPUs."""

from jax_core.kernels.triton.kernel import HANDLES, backward, default_params, forward, unsupported

__all__ = ["HANDLES", "backward", "default_params", "forward", "unsupported"]
