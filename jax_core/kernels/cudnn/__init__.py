"""cuDNN's fused attention, for NVIDIA GPUs."""

from jax_core.kernels.contract import chosen_by_itself as default_params
from jax_core.kernels.contract import finish, takes_documents
from jax_core.kernels.cudnn.kernel import CAPABILITIES, CONTINUES, backward, forward, unsupported

__all__ = ["CAPABILITIES", "CONTINUES", "backward", "default_params", "finish", "forward", "takes_documents", "unsupported"]
