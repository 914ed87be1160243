"""cuDNN's fused attention, for NVIDIA GPUs."""

from jax_core.kernels.cudnn.kernel import HANDLES, backward, default_params, forward, unsupported

__all__ = ["HANDLES", "backward", "default_params", "forward", "unsupported"]
