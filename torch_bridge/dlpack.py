"""Tensors between torch and JAX through DLPack, without copying.

Memory is shared both ways and stays alive as long as either side holds it. Three rules follow for a caller:

- A torch tensor that JAX reads must not be modified in place before JAX has finished. On a CPU, JAX computes on its own
  threads: wait for the results (``jax.block_until_ready``) before control returns to torch. On a GPU the order is kept by
  streams: hold the inputs until one result has been through :func:`to_torch`, which makes torch's stream wait for JAX.
- A tensor that came from :func:`to_torch` is the memory of a JAX array: drop that array, or it changes with the tensor.
- A JAX function that returns one of its arguments unchanged may return the very same memory.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import jax

# XLA's CPU client takes foreign memory only at this alignment; torch allocates at it, but a slice may start anywhere.
CPU_ALIGNMENT = 64

_INT32 = torch.iinfo(torch.int32)
_WIDE = (torch.float64, torch.int64, torch.uint64, torch.complex128)


def keeping_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is torch's current CUDA device, and after which the caller's is again.

    Torch exports a tensor on its current device only, and JAX, starting on several GPUs, leaves another one current.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def precision_scope(dtype: torch.dtype) -> AbstractContextManager[object]:
    """A context in which JAX keeps ``dtype``: x64 on for float64, nothing for every other dtype.

    x64 belongs to the thread and the scope, so the rest of the program keeps JAX's default.
    """
    if dtype not in (torch.float64, torch.complex128):
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def narrow_ids(tensor: torch.Tensor, name: str = "ids") -> torch.Tensor:
    """Integer ids of any width as int32, the widest integer that JAX has without x64. int32 comes back as it is.

    Raises ValueError for a tensor that is no integer tensor, and for a value that int32 cannot hold.
    """
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}; convert them with .to(torch.int32)")
    if tensor.numel() and tensor.dtype.itemsize >= _INT32.bits // 8:
        _check_range(tensor, name)
    return tensor.to(torch.int32)


def _check_range(tensor: torch.Tensor, name: str) -> None:
    low, high = (int(bound) for bound in torch.aminmax(tensor.to(torch.int64)))
    if low < _INT32.min or high > _INT32.max:
        raise ValueError(f"{name} must fit in int32 ({_INT32.min} .. {_INT32.max}), got values from {low} to {high}; renumber them")


def _exportable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as DLPack and XLA take it: no graph, no lazy conjugation or negation, contiguous, aligned."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.device.type == "cpu" and tensor.data_ptr() % CPU_ALIGNMENT:
        return tensor.clone()
    return tensor


def _check_width(tensor: torch.Tensor) -> None:
    import jax

    if tensor.dtype in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # made at run time
        raise ValueError(
            f"a tensor of {tensor.dtype} needs JAX's x64 mode, or JAX would narrow it; enter precision_scope(torch.float64) "
            "for floating point, narrow ids with narrow_ids"
        )


def to_jax(tensor: torch.Tensor, device: "jax.Device | None" = None) -> "jax.Array":
    """The tensor as a JAX array of the same shape and dtype, on ``device`` (default: the device the tensor is on).

    Zero-copy for a contiguous tensor on that device; anything else is made contiguous (and, on a CPU, 64-byte aligned) by
    torch first. The gradient graph stays behind. Raises ValueError for 64-bit dtypes outside JAX's x64 mode, and for a tensor
    without memory (meta) or without dense memory (sparse).
    """
    import jax

    if tensor.is_meta:
        raise ValueError("a tensor without memory (device meta) cannot be given to JAX; materialise it first")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ValueError(f"JAX takes dense tensors, got layout {tensor.layout}; call .to_dense() first")
    _check_width(tensor)
    if tensor.is_cuda:
        jax.local_devices()  # starts JAX, if it has not: before the device is set
    with keeping_device(tensor.device):
        return jax.dlpack.from_dlpack(_exportable(tensor), device=device)


def to_torch(array: "jax.Array") -> torch.Tensor:
    """The array as a torch tensor of the same shape and dtype, sharing its memory.

    On a CPU it waits until JAX has written the array; on a GPU torch's current stream does. Raises ValueError for an array
    that is spread over several devices.
    """
    devices = len(array.sharding.device_set)
    if devices != 1:
        raise ValueError(f"to_torch takes an array on one device, got one on {devices}; give it mesh.to_local(array)")
    if array.platform() == "cpu":
        array.block_until_ready()
    return torch.from_dlpack(array)
