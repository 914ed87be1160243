"""Exchanges tensors between torch and JAX through DLPack, with zero copy.

Memory is shared both ways and stays alive as long as either side holds it. (The calls of this library do not go this way on GPUs:
:mod:`torch_bridge.backends.dlpack_view` gives JAX views that own nothing, and the call holds the tensors.) Three rules follow for
a caller:

- A torch tensor that JAX reads must not be modified in place before JAX has finished. On a CPU, JAX computes on its own
  threads: wait for the results (``jax.block_until_ready``) before control returns to torch. On a GPU streams keep the order:
  hold the inputs until one result has been through :func:`to_torch`, which makes torch's stream wait for JAX.
- A tensor from :func:`to_torch` shares its memory with a JAX array: stop using that array, or it changes with the tensor. On a
  GPU the tensor must not be dropped while a stream still reads it, because JAX does not know torch's streams and
  ``record_stream`` has no effect on memory that torch did not allocate.
- A JAX function that returns one of its arguments unchanged may return the same memory.

docs/contributing/streams.md says how ``ring_attention`` follows these rules, and which of them remain for its users.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack, to_dlpack

from jax_core.internals import jaxlib
from torch_bridge.backends.dlpack_view import View, view_capsule

if TYPE_CHECKING:
    import jax

# XLA's CPU client accepts external memory only at this alignment. torch allocates with it, but a slice may start anywhere.
CPU_ALIGNMENT = 64
GPU_ALIGNMENT = 16  # what GPU kernels rely on

_DL_CPU, _DL_CUDA = 1, 2  # DLPack's device types
DEFAULT_STREAM = 1  # DLPack's number for the stream that CUDA calls 0
_NOTHING = nullcontext()
_INT32 = torch.iinfo(torch.int32)
_WIDE = (torch.float64, torch.int64, torch.uint64, torch.complex128)


def keeping_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is torch's current CUDA device; on exit the caller's current device is restored.

    torch exports tensors on its current device only, and JAX changes the current device when it starts on several GPUs.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def precision_scope(dtype: torch.dtype) -> AbstractContextManager[object]:
    """A context in which JAX keeps ``dtype``: it enables x64 for float64 and does nothing for any other dtype.

    x64 is enabled for this thread and scope only, so the rest of the program keeps JAX's default.
    """
    if dtype not in (torch.float64, torch.complex128):
        return _NOTHING
    import jax

    return jax.enable_x64(True)


def narrow_ids(tensor: torch.Tensor, name: str = "ids") -> torch.Tensor:
    """Integer ids of any width as int32, the widest integer that JAX has without x64. An int32 tensor is returned as it is.

    Raises ValueError for a tensor that does not hold integers, and for a value that int32 cannot hold. On a GPU, where the host
    would have to wait to read the values, the device asserts that they fit, as torch does for out-of-range indices.
    """
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}; convert them with .to(torch.int32)")
    if tensor.numel() and tensor.dtype.itemsize >= _INT32.bits // 8:
        _check_range(tensor, name)
    return tensor.to(torch.int32)


def _check_range(tensor: torch.Tensor, name: str) -> None:
    tensor = _unwrapped(tensor)
    must = f"{name} must fit in int32 ({_INT32.min} .. {_INT32.max})"
    least = 0 if tensor.dtype == torch.uint64 else _INT32.min  # the upper half of uint64 is negative in int64
    wide = tensor.to(torch.int64)
    fits = ((wide >= least) & (wide <= _INT32.max)).all()
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(fits, f"{must}; renumber them")
    elif not fits:
        values = tensor.numpy()
        raise ValueError(f"{must}, got values from {values.min()} to {values.max()}; renumber them")


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """All entries of a tensor that ``torch.vmap`` maps over, whose values can be looked at."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def exportable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as DLPack and XLA accept it: no lazy conjugation or negation, contiguous, aligned. Copies only if needed."""
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.data_ptr() % (GPU_ALIGNMENT if tensor.is_cuda else CPU_ALIGNMENT):
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

    Zero copy for a contiguous tensor on that device; torch first makes anything else contiguous (and, on a CPU, 64-byte aligned).
    The tensor is detached from its autograd graph. Raises ValueError for 64-bit dtypes outside JAX's x64 mode, and for a tensor
    without memory (meta) or without dense memory (sparse).
    """
    import jax

    if tensor.is_meta:
        raise ValueError("a tensor without memory (device meta) cannot be given to JAX; materialise it first")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ValueError(f"JAX takes dense tensors, got layout {tensor.layout}; call .to_dense() first")
    _check_width(tensor)
    if tensor.is_cuda:
        jax.local_devices()  # starts JAX if needed, which must happen before the device is set
    with keeping_device(tensor.device):
        return jax.dlpack.from_dlpack(exportable(tensor.detach()), device=device)


def to_torch(array: "jax.Array") -> torch.Tensor:
    """The array as a torch tensor of the same shape and dtype, sharing its memory.

    On a CPU the host waits until JAX has written the array; on a GPU torch's current stream waits. Raises ValueError for an array
    that is spread over several devices.
    """
    devices = len(array.sharding.device_set)
    if devices != 1:
        raise ValueError(f"to_torch takes an array on one device, got one on {devices}; give it jax_mesh.to_local(array)")
    if array.platform() == "cpu":
        array.block_until_ready()
    return torch.from_dlpack(array)


class Conversions(NamedTuple):
    """:func:`to_jax` and :func:`to_torch` for calls of many tensors on one device.

    ``to_array(tensor, stream)``: takes an :func:`exportable` tensor of a dtype that JAX keeps. On a GPU JAX reads the array after
    all work queued so far on ``stream``, one of JAX's streams; with None there is no such ordering. There the array does not own
    the memory: the caller holds the tensor until torch's stream waits for JAX. On a CPU the array holds it.
    ``to_tensor(array, stream)``: this process's shard of ``array``. On a GPU ``stream``, a torch stream by its DLPack number, waits
    for JAX; on a CPU, with None, the host waits.
    ``wait(array, stream)``: the waiting alone.
    """

    to_array: "Callable[[torch.Tensor, int | None], jax.Array]"
    to_tensor: "Callable[[jax.Array, int | None], torch.Tensor]"
    wait: "Callable[[jax.Array, int | None], object]"


def conversions(here: torch.device, there: "jax.Device") -> Conversions:
    """Conversions between torch's and JAX's views of one device. Uses jaxlib's own functions if they are available, because the
    Python wrappers in ``jax.dlpack`` take several times as long."""
    return _direct_conversions(here, there) or _public_conversions(here, there)


def _public_conversions(here: torch.device, there: "jax.Device") -> Conversions:
    import jax

    def to_array(tensor: torch.Tensor, stream: int | None) -> "jax.Array":
        return to_jax(tensor) if here.type == "cpu" else jax.dlpack.from_dlpack(View(tensor), device=there)

    def to_tensor(array: "jax.Array", stream: int | None) -> torch.Tensor:
        return to_torch(array.addressable_data(0))

    return Conversions(to_array, to_tensor, to_tensor)


def _capsule(tensor: torch.Tensor) -> object:
    """Of a contiguous tensor, with the strides of its shape: torch allows any for a dimension of 1 (one K/V head, moved before the
    sequence and back), and a compiled program takes those only that it was compiled for."""
    return to_dlpack(tensor.view(tensor.shape) if 1 in tensor.shape else tensor)


def _nothing() -> None:
    pass


def _direct_conversions(here: torch.device, there: "jax.Device") -> Conversions | None:
    """None if jaxlib lacks these private functions, or if they behave differently in this version."""
    kind, stream, capsule = (_DL_CPU, None, _capsule) if here.type == "cpu" else (_DL_CUDA, DEFAULT_STREAM, view_capsule)
    try:
        functions = jaxlib()
        take, give = functions.dlpack_managed_tensor_to_buffer, functions.buffer_to_dlpack_managed_tensor
        collect_garbage = getattr(functions, "collect_garbage", _nothing)

        def wait(array: "jax.Array", stream: int | None) -> None:
            give(array, stream=stream)
            collect_garbage()  # or the array stays alive until JAX's next call: the capsule let go of it without Python's lock

        direct = Conversions(
            lambda tensor, stream: take(capsule(tensor), there, stream, None, kind),
            lambda array, stream: from_dlpack(give(array, stream=stream)),
            wait,
        )
        with _disable_current_modes():  # a program may be made while torch traces, but this tensor must be real
            sample = torch.zeros(CPU_ALIGNMENT, device=here)
            back = direct.to_tensor(direct.to_array(sample, None), stream)
            return direct if back.data_ptr() == sample.data_ptr() else None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
