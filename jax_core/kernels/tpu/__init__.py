"""The kernels in Pallas, for TPUs."""

from jax_core.kernels.contract import finish
from jax_core.kernels.tpu.kernel import CONTINUES, HANDLES, backward, default_params, forward, unsupported

__all__ = ["CONTINUES", "HANDLES", "backward", "default_params", "finish", "forward", "unsupported"]
