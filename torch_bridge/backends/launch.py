"""How one call crosses between torch and JAX on one device: tensors into JAX, results back to torch.

docs/contributing/streams.md explains who waits for whom and who owns which memory; this module implements it.
"""

import atexit
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

import jax
import torch

from torch_bridge.backends.dlpack import DEFAULT_STREAM, conversions, exportable
from torch_bridge.backends.operation import TensorSpec
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.start.jax_memory import reserve_pool, trim_jax_memory

T = TypeVar("T")
Join = Callable[[jax.Array], jax.Array]
Function = Callable[..., Sequence[jax.Array]]  # of global arrays, None for an absent one

_LETTING_GO = 0.02  # seconds
_MOST_VIEWS, _MOST_USES = 1024, 1 << 16
# What XLA's allocator says, before anything is launched. NCCL and the driver may be out of memory in the middle of a program.
_OUT_OF_MEMORY = re.compile("Out of memory while trying to allocate(?!.*NCCL)", re.DOTALL)


class Compiled(NamedTuple):
    """A program of global arrays, and the specs of this process's shards of its results. If the launcher is ``in_place``, the
    program takes one more array for each result and is to write the result into it."""

    function: Function
    results: tuple[TensorSpec, ...]


class Outcome(NamedTuple):
    """What a call returned. ``event``: completes when the device has finished the call; None if the host has waited for it."""

    results: list[torch.Tensor]
    event: torch.cuda.Event | None


class Launcher(Protocol):
    in_place: bool

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        """Runs the program on the global arrays that ``join`` makes of this process's shards (None for an absent operand)."""


def launcher(device: torch.device) -> Launcher:
    """The launcher for tensors on ``device``, the same for all threads; on a GPU their calls take turns. Starts JAX's backend: call
    ``runtime.start`` before."""
    with _making:
        return _launcher(device)


@cache
def _launcher(device: torch.device) -> Launcher:
    return _OnCpu(device) if device.type == "cpu" else _OnGpu(device)


_making = Lock()


class _OnCpu:
    """JAX computes on its own threads. A call waits for its results, so nothing of it is still running when control returns to
    torch, and memory can be shared both ways."""

    in_place: bool = False

    def __init__(self, device: torch.device) -> None:
        self.convert = conversions(device, jax_device(device))
        # JAX's threads release a call's tensors a moment after its results are ready. Freeing a tensor takes the GIL, and a thread
        # that asks for the GIL while the interpreter shuts down is terminated, which takes the whole process down.
        atexit.register(time.sleep, _LETTING_GO)

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        to_array, to_tensor, _ = self.convert
        arrays = [None if x is None else join(to_array(exportable(x), None)) for x in tensors]  # held until the results are ready
        results = compiled.function(*arrays)
        for result in results:
            result.block_until_ready()
        return Outcome([to_tensor(result, None) for result in results], None)


class _Copied(NamedTuple):
    """Results of the last call that had to be copied: the copying stream, the event after the copies, and the arrays they read."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    arrays: list[jax.Array]


class _Views:
    """JAX's arrays of tensors' memory. They own none of it, so one that was made before serves whatever tensor of its shape and
    dtype lies there now: torch's allocator gives the same memory in each step, and an array takes longer to make than to find.
    All are let go now and then, and with them whatever JAX notes of an array's uses.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[object, ...], jax.Array] = {}
        self._uses = 0

    def __call__(self, tensor: torch.Tensor, join: Join, make: Callable[[torch.Tensor], jax.Array]) -> jax.Array:
        self._uses += 1
        if len(self._arrays) >= _MOST_VIEWS or self._uses % _MOST_USES == 0:
            self._arrays.clear()
        key = join, tensor.data_ptr(), tensor.shape, tensor.dtype
        array = self._arrays.get(key)
        if array is None or array.is_deleted():  # some delete all arrays that JAX knows
            array = self._arrays[key] = join(make(tensor))
        return array


class _OnGpu:
    """The host waits for nothing. JAX's one stream waits for torch's current stream, which then waits for JAX: whatever torch does
    with the tensors' memory afterwards comes after JAX. So JAX's arrays own none of it, and a tensor that is dropped when a call
    has returned is free at once, however far behind the device is. JAX writes the results into memory of torch's own, whose
    allocator knows which streams use it. A result that JAX wrote elsewhere all the same is copied, and JAX gets that memory back
    with the next call, which is ordered after the copy.
    """

    in_place: bool = True

    def __init__(self, device: torch.device) -> None:
        self._torch_device, self._jax_device = device, jax_device(device)
        reserve_pool(device)
        self.convert = conversions(device, self._jax_device)
        self._lock, self._views = Lock(), _Views()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._copied: _Copied | None = None
        self._unfinished: list[tuple[torch.cuda.Stream, list[torch.Tensor | None]]] = []

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        with self._lock:
            stream = torch.cuda.current_stream(self._torch_device)
            before = self._release(stream)
            homes = self._allocated(lambda: [self._empty(spec) for spec in compiled.results])
            # Held until the stream waits for JAX: they are the only owners of what JAX uses, the caller's tensors or copies.
            inputs = self._allocated(lambda: [None if tensor is None else exportable(tensor) for tensor in tensors])
            in_use = [*inputs, *homes]
            try:
                arrays = self._run(join, compiled.function, inputs, homes if self.in_place else [], stream)
            except BaseException as error:
                if _may_have_begun(error):
                    self._unfinished.append((stream, in_use))
                raise
            del before
            self._let_go(stream)
            return self._settle(arrays, homes, stream)

    def _let_go(self, stream: torch.cuda.Stream) -> None:
        """Give back what calls that broke off may have used: JAX ran them before the call that ``stream`` now waits for."""
        for other, _ in self._unfinished:
            if other != stream:
                other.wait_stream(stream)
        self._unfinished.clear()

    def _release(self, stream: torch.cuda.Stream) -> _Copied | None:
        """What JAX gets back once its next computation is under way, which waits for ``stream``, which waits for the copies."""
        if self._copied is not None and self._copied.stream != stream:
            stream.wait_event(self._copied.event)
        copied, self._copied = self._copied, None
        return copied

    def _empty(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._torch_device)

    def _allocated(self, allocate: Callable[[], list[T]]) -> list[T]:
        """What ``allocate`` returns; where torch is out of memory, once JAX has given back what it only keeps."""
        with suppress(torch.cuda.OutOfMemoryError):
            return allocate()
        trim_jax_memory(self._torch_device)
        return allocate()

    def _run(
        self, join: Join, function: Function, inputs: Tensors, homes: list[torch.Tensor], stream: torch.cuda.Stream
    ) -> Sequence[jax.Array]:
        try:
            return self._sent(join, function, inputs, homes, stream)
        except jax.errors.JaxRuntimeError as error:
            if not _out_of_memory(error):
                raise
        # JAX cannot use what torch's allocator caches. XLA allocates before it launches, so the other ranks only wait.
        torch.cuda.empty_cache()
        return self._sent(join, function, inputs, homes, stream)

    def _sent(
        self, join: Join, function: Function, inputs: Tensors, homes: list[torch.Tensor], stream: torch.cuda.Stream
    ) -> Sequence[jax.Array]:
        """The results of a program that ``stream`` waits for. JAX dispatches on a thread of its own, so what fails there is
        raised by the wait."""
        arrays = function(*self.arrays(join, inputs, homes, stream))
        self.convert.wait(arrays[-1], _number(stream))  # all results of a program are ready together
        return arrays

    def arrays(self, join: Join, inputs: Tensors, homes: list[torch.Tensor], stream: torch.cuda.Stream) -> list[jax.Array | None]:
        """A program waits for all its arguments, so one that is made for this call carries the event that JAX waits for: after any
        copies that ``exportable`` made. What results are written into is donated, and so is made anew."""
        after, to_array = self.after(stream), self.convert.to_array
        if not homes:
            return [None if x is None else join(to_array(x, after)) for x in inputs]
        views = [None if x is None else self._views(x, join, lambda x: to_array(x, None)) for x in inputs]
        first, *others = homes
        return [*views, join(to_array(first, after)), *(join(to_array(x, None)) for x in others)]

    def after(self, stream: torch.cuda.Stream) -> int:
        """One of JAX's streams, made to wait for ``stream`` at this point."""
        number = self._jax_device.get_stream_for_external_ready_events()
        if number not in self._streams:
            self._streams[number] = torch.cuda.ExternalStream(number, device=self._torch_device)
        self._streams[number].wait_stream(stream)
        return number

    def _settle(self, arrays: Sequence[jax.Array], homes: list[torch.Tensor], stream: torch.cuda.Stream) -> Outcome:
        event = torch.cuda.Event()
        pointers = [array.unsafe_buffer_pointer() for array in arrays]
        if pointers == [home.data_ptr() for home in homes]:
            event.record(stream)
            return Outcome(homes, event)
        # XLA may have swapped the memory of two results of the same spec.
        by_memory = {(home.data_ptr(), home.shape, home.dtype): home for home in homes}
        results = [by_memory.get((pointer, home.shape, home.dtype)) for pointer, home in zip(pointers, homes, strict=True)]
        elsewhere = [array for array, result in zip(arrays, results, strict=True) if result is None]
        self._copied = _Copied(stream, event, elsewhere) if elsewhere else None
        try:
            copies = iter(self._allocated(lambda: [self.convert.to_tensor(x, _number(stream)).clone() for x in elsewhere]))
            return Outcome([next(copies) if result is None else result for result in results], event)
        finally:
            event.record(stream)


def _out_of_memory(error: BaseException) -> bool:
    """Whether JAX found no memory for a program, which it looks for before it launches any of it."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def _may_have_begun(error: BaseException) -> bool:
    """Whether JAX may use a call's memory still. An error of Python's, as while a program is traced, comes before it is launched;
    an interrupt may come at any time."""
    launched = isinstance(error, jax.errors.JaxRuntimeError) or not isinstance(error, Exception)
    return launched and not _out_of_memory(error)


def _number(stream: torch.cuda.Stream) -> int:
    """DLPack's number for a stream."""
    return stream.cuda_stream or DEFAULT_STREAM


def jax_device(device: torch.device) -> jax.Device:
    """JAX's device for tensors on ``device``. Raises RuntimeError if this process has none."""
    if device.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    gpus = {gpu.local_hardware_id: gpu for gpu in jax.local_devices(backend="gpu")}
    if device.index not in gpus:
        raise RuntimeError(
            f"JAX must see the GPU of the tensors, {device}, but has only {sorted(gpus)} in this process; each process of a ring "
            "has one GPU: torch.cuda.set_device(local_rank) before the first call"
        )
    return gpus[device.index]
