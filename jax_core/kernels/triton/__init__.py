"""The kernels in Triton, for NVIDIA GPUs."""

from jax_core.kernels.contract import finish, takes_documents
from jax_core.kernels.triton.kernel import CAPABILITIES, CONTINUES, backward, default_params, forward, unsupported
from jax_core.kernels.triton.params import configs

__all__ = [
    "CAPABILITIES",
    "CONTINUES",
    "backward",
    "configs",
    "default_params",
    "finish",
    "forward",
    "takes_documents",
    "unsupported",
]
