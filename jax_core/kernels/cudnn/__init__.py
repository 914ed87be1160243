"""cuDNN's fused attention, for NVIDIA GPUs."""

from jax_core.kernels.cudnn.kernel import backward, default_params, forward, unsupported

__all__ = ["backward", "default_params", "forward", "unsupported"]
