"""DLPack capsules of a tensor's memory that do not own it: whoever imports one keeps nothing alive.

docs/contributing/streams.md says who does.

A capsule is a ``DLManagedTensor`` (https://dmlc.github.io/dlpack/latest/c_api.html) in a block from ``malloc``, with ``free`` as
its deleter: releasing it needs neither Python nor its lock.
"""

import ctypes
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import to_dlpack

_NAME = b"dltensor"
_POINTER = Struct("P")
_LIBC = ctypes.CDLL(None)
_FREE = ctypes.cast(_LIBC.free, ctypes.c_void_p)

# Function objects of this module's own: those that ctypes keeps in a library are shared, and whoever sets their argtypes sets
# everybody's (tvm_ffi does so).
_malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", _LIBC))
_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(("memmove", _LIBC))
_NewCapsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new_capsule = _NewCapsule(("PyCapsule_New", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, with the fields of its ``DLTensor``, device and dtype in line."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_SIZE = ctypes.sizeof(_Managed)


class _Template(NamedTuple):
    """What the capsules of tensors of one shape, dtype and device have in common: all that follows the pointer to the memory.
    ``shape``: where it points to; kept for as long as the process lives, since a capsule may be."""

    rest: bytes
    shape: "ctypes.Array[ctypes.c_int64]"


@cache
def _template(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Template:
    capsule = to_dlpack(torch.empty(0, dtype=dtype, device=device))  # has torch's codes for the dtype and the device
    managed = _Managed.from_buffer_copy(ctypes.string_at(_pointer_of(capsule, _NAME), _SIZE))
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    managed.ndim, managed.shape, managed.strides = len(shape), ctypes.addressof(sizes), None
    managed.byte_offset, managed.manager_ctx, managed.deleter = 0, None, _FREE.value
    return _Template(bytes(managed)[_POINTER.size :], sizes)


def view_capsule(tensor: torch.Tensor) -> object:
    """A DLPack capsule of a contiguous ``tensor``'s memory. The caller keeps the tensor for as long as the memory is used."""
    block = _POINTER.pack(tensor.data_ptr()) + _template(tensor.shape, tensor.dtype, tensor.device).rest
    return _new_capsule(_memmove(_malloc(_SIZE), block, _SIZE), _NAME, None)


class View:
    """The same for consumers that ask a tensor for its capsule. Ordered after the current stream as by the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        self._tensor.detach().__dlpack__(**options)  # for the streams; that capsule is dropped
        return view_capsule(self._tensor)
