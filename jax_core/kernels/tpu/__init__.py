"""The kernels in Pallas, for TPUs.

Experimental: run in Pallas' interpreter and compiled for four generations of TPUs, never run on one.
"""

from jax_core.kernels.contract import finish, takes_documents
from jax_core.kernels.tpu.kernel import CAPABILITIES, CONTINUES, backward, default_params, forward, unsupported
from jax_core.kernels.tpu.params import configs

EXPERIMENTAL = "run in Pallas' interpreter and compiled for four generations of TPUs, never run on one"

__all__ = [
    "CAPABILITIES",
    "CONTINUES",
    "EXPERIMENTAL",
    "backward",
    "configs",
    "default_params",
    "finish",
    "forward",
    "takes_documents",
    "unsupported",
]
