"""flash-attn-4's kernels, for Hopper."""

from jax_core.kernels.contract import chosen_by_itself as default_params
from jax_core.kernels.cute.kernel import CONTINUES, backward, finish, forward
from jax_core.kernels.cute.limits import CAPABILITIES, takes_documents, unsupported

__all__ = ["CAPABILITIES", "CONTINUES", "backward", "default_params", "finish", "forward", "takes_documents", "unsupported"]
