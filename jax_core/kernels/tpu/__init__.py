"""The kernels in Pallas, for TPUs."""

from jax_core.kernels.contract import finish
from jax_core.kernels.tpu.kernel import CAPABILITIES, CONTINUES, backward, configs, default_params, forward, unsupported

__all__ = ["CAPABILITIES", "CONTINUES", "backward", "configs", "default_params", "finish", "forward", "unsupported"]
