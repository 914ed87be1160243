"""The kernel in plain XLA, which runs on any device."""

from jax_core.kernels.xla.kernel import FUSED_BACKWARD, backward, default_params, forward, unsupported

__all__ = ["FUSED_BACKWARD", "backward", "default_params", "forward", "unsupported"]
