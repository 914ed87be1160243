"""DLPack capsules of a tensor's memory that do not own it: whoever imports one keeps nothing alive (docs/streams.md says who does).

A capsule consists of a ``DLManagedTensor`` (https://dmlc.github.io/dlpack/latest/c_api.html) and the shape, in one block from
``malloc``, with ``free`` as its deleter: releasing it needs neither Python nor its lock.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.dlpack import to_dlpack

_NAME = b"dltensor"
_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = (ctypes.c_size_t,)
_FREE = ctypes.cast(_LIBC.free, ctypes.c_void_p)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


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


class _Form(NamedTuple):
    """What the capsules of tensors of one shape, dtype and device have in common."""

    block: bytes
    size: int


@cache
def _form(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Form:
    capsule = to_dlpack(torch.empty(0, dtype=dtype, device=device))  # has torch's codes for the dtype and the device
    managed = _Managed.from_buffer_copy(ctypes.string_at(_pointer_of(capsule, _NAME), _SIZE))
    managed.ndim, managed.strides, managed.byte_offset, managed.manager_ctx = len(shape), None, 0, None
    managed.deleter = _FREE.value
    block = bytes(managed) + bytes((ctypes.c_int64 * len(shape))(*shape))
    return _Form(block, len(block))


def view_capsule(tensor: torch.Tensor) -> object:
    """A DLPack capsule of a contiguous ``tensor``'s memory. The caller keeps the tensor for as long as the memory is used."""
    block, size = _form(tensor.shape, tensor.dtype, tensor.device)
    address = _LIBC.malloc(size)
    ctypes.memmove(address, block, size)
    managed = _Managed.from_address(address)
    managed.data, managed.shape = tensor.data_ptr(), address + _SIZE
    return _new_capsule(address, _NAME, None)


class View:
    """The same for consumers that ask a tensor for its capsule. They are ordered after the current stream, as by the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: object) -> object:
        self._tensor.__dlpack__(**options)  # for the streams; that capsule is dropped
        return view_capsule(self._tensor)
