"""The kernel in plain XLA, which runs on any device."""

from jax_core.kernels.contract import finish, takes_documents
from jax_core.kernels.xla.kernel import CAPABILITIES, CONTINUES, backward, configs, default_params, forward, unsupported

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
