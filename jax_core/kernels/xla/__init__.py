"""The kernel in plain XLA, which runs on any device."""

from jax_core.kernels.xla.kernel import HANDLES, backward, default_params, forward, unsupported

__all__ = ["HANDLES", "backward", "default_params", "forward", "unsupported"]
