"""The kernels in Pallas, for TPUs.

Experimental: run in Pallas' interpreter and compiled for four generations of TPUs, never run on one.
"""

from jax import Array
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, KernelConfig, Pair, Partial, Residuals, finish, takes_documents
from jax_core.kernels.tpu.params import CAPABILITIES, CONTINUES, configs, default_params, unsupported

EXPERIMENTAL = "run in Pallas' interpreter and compiled for four generations of TPUs, never run on one"


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    from jax_core.kernels.tpu import kernel  # loads Pallas for TPUs, which takes a third of a second

    return kernel.forward(pair, carry, out_dtype, config)


def backward(pair: Pair, residuals: Residuals, dq: Array | None, config: KernelConfig[BwdParams]) -> Grads[Array]:
    from jax_core.kernels.tpu import kernel

    return kernel.backward(pair, residuals, dq, config)


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
