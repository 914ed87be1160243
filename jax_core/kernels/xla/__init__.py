"""The kernel in plain XLA, which runs on any device."""

from jax_core.kernels.xla.kernel import backward, default_params, forward, unsupported

__all__ = ["backward", "default_params", "forward", "unsupported"]
