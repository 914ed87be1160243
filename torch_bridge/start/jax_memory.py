"""The allocator of JAX beside torch's on one GPU: which one JAX gets, and how it gives memory back."""

import ctypes
import os
import warnings
from functools import cache

import torch

_ALLOCATOR, _PREALLOCATE = "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"
# CUDA's own stream-ordered pool: it holds what was in use at once, where XLA's own ("bfc") doubles its regions and gives none back.
_POOL = "cuda_async"
_BFC = ("default", "bfc")
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
_POOL_BYTES = 2**30


def choose_allocator(running: bool) -> None:
    """Set what JAX reads when its backend starts; the user's own settings are kept, and so is a backend that is ``running``. A
    RuntimeWarning, once, says what either costs."""
    if os.environ.get(_ALLOCATOR, "default") in _BFC and _on_gpu(running):
        _say_once_what_it_costs(running)
    os.environ.setdefault(_PREALLOCATE, "false")  # otherwise JAX takes 75 % of the GPU that torch uses too
    if torch.version.cuda is not None and not running:
        os.environ.setdefault(_ALLOCATOR, _POOL)


@cache
def _say_once_what_it_costs(running: bool) -> None:
    if running and _PREALLOCATE not in os.environ:
        warnings.warn(
            "JAX was running in this process before ring_attn started it, and has taken its share of the GPU's memory, 75 % unless "
            "told otherwise, which torch cannot use. Call torch_bridge.runtime.start() before the first use of JAX, or set "
            f"{_PREALLOCATE}=false in the environment",
            RuntimeWarning,
            stacklevel=3,
        )
    elif os.environ.get(_PREALLOCATE, "false") == "false" and (running or _ALLOCATOR in os.environ):
        why = "was running in this process before ring_attn started it" if running else f"has the allocator of {_ALLOCATOR}"
        instead = "call torch_bridge.runtime.start() before the first use of JAX" if running else "leave that variable out"
        warnings.warn(
            f"JAX {why}: its pool grows by doubling and gives nothing back, so it may hold twice the memory that it needs. To have "
            f"{_POOL}, {instead}, or set {_ALLOCATOR}={_POOL} in the environment",
            RuntimeWarning,
            stacklevel=3,
        )


def _on_gpu(running: bool) -> bool:
    if not running:
        return torch.cuda.is_available()
    import jax

    return jax.default_backend() == "gpu"


def reserve_pool(device: torch.device) -> None:
    """Once JAX runs: let its pool keep what short calls need. It would give back all that is unused at every synchronisation of the
    device, and to ask CUDA for it again takes longer than such a call."""
    if os.environ.get(_ALLOCATOR) != _POOL:
        return
    cuda, pool = default_pool(device)
    threshold = ctypes.c_uint64()
    cuda.cuMemPoolGetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(threshold))
    if threshold.value < _POOL_BYTES:  # more where torch uses the same pool (backend:cudaMallocAsync)
        cuda.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(ctypes.c_uint64(_POOL_BYTES)))


def trim_jax_memory(device: torch.device) -> None:
    """Give what JAX's pool only keeps back to the GPU, once the device has done all that it was sent. Only ``cuda_async`` can."""
    if os.environ.get(_ALLOCATOR) != _POOL:
        return
    torch.cuda.synchronize(device)
    cuda, pool = default_pool(device)
    cuda.cuMemPoolTrimTo(pool, ctypes.c_size_t(0))


def default_pool(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """CUDA's driver, and its default pool of this device, which JAX takes. An empty one where the driver has none."""
    cuda, number, pool = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(number), device.index)
    cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), number)
    return cuda, pool
