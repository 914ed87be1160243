"""The kernels in Pallas, for TPUs."""

from jax_core.kernels.tpu.kernel import HANDLES, backward, default_params, forward, unsupported

__all__ = ["HANDLES", "backward", "default_params", "forward", "unsupported"]
