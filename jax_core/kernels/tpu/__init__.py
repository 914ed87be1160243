"""The kernels in Pallas, for TPUs."""

from jax_core.kernels.contract import finish
from jax_core.kernels.tpu.kernel import CONTINUES, HANDLES, backward, configs, default_params, forward, unsupported

__all__ = ["CONTINUES", "HANDLES", "backward", "configs", "default_params", "finish", "forward", "unsupported"]
