"""The way of one call: tensors into JAX, results back to torch, on one device.

Who waits for whom, and whose memory is whose, is argued in docs/streams.md; this is where it is done.
"""

import atexit
import re
import time
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import NamedTuple, Protocol

import jax
import torch

from torch_bridge.dlpack import DEFAULT_STREAM, conversions, exportable
from torch_bridge.request import Form
from torch_bridge.ring import Tensors

Join = Callable[[jax.Array], jax.Array]

_LETTING_GO = 0.02  # seconds
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)


class Compiled(NamedTuple):
    """A program of global arrays, and the forms of this process's shards of its results. Where the crossing is ``in_place`` the
    program takes one array more for each result, and is to write it there."""

    function: Callable
    results: tuple[Form, ...]


class Outcome(NamedTuple):
    """What a call gave. ``event``: when the device is past the call; None where the host has waited for it."""

    results: list[torch.Tensor]
    event: torch.cuda.Event | None


class Crossing(Protocol):
    in_place: bool

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        """The program's results of the global arrays that ``join`` makes of this process's shards (None where there is none)."""


@cache  # one for each device, which has one JAX
def crossing(device: torch.device) -> Crossing:
    """The way into JAX for tensors on ``device``. Starts JAX's backend: call ``runtime.start`` before."""
    return _OnCpu(device) if device.type == "cpu" else _OnGpu(device)


class _OnCpu:
    """JAX computes on its own threads. A call waits for its results: nothing of it is left when control is torch's again, and
    memory can be shared both ways."""

    in_place: bool = False

    def __init__(self, device: torch.device) -> None:
        self.convert = conversions(device, jax.local_devices(backend="cpu")[0])
        # JAX's threads let go of a call's tensors a moment after its results are there. Freeing one takes Python's lock, and
        # whoever asks for that while Python ends is ended by it, and the process with him.
        atexit.register(time.sleep, _LETTING_GO)

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        to_array, to_tensor = self.convert
        arrays = [None if x is None else join(to_array(exportable(x), None)) for x in tensors]  # held until the results are there
        results = compiled.function(*arrays)
        for result in results:
            result.block_until_ready()
        return Outcome([to_tensor(result, None) for result in results], None)


class _Copied(NamedTuple):
    """Results of the last call that had to be copied: the stream that does it, when it has, and what it reads."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    arrays: list[jax.Array]


class _OnGpu:
    """The host waits for nothing. JAX's one stream waits for torch's current one, which then waits for JAX: whatever torch makes of
    the tensors' memory afterwards comes after JAX. Results are in memory of torch's own, whose allocator knows the streams that use
    it: JAX writes them there. What it has written elsewhere all the same is copied, and JAX has that memory back with the next
    call, which comes after the copy.
    """

    in_place: bool = True

    def __init__(self, device: torch.device) -> None:
        self._torch_device, self._jax_device = device, _jax_gpu(device)
        self.convert = conversions(device, self._jax_device)
        self._lock = Lock()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._copied: _Copied | None = None

    def __call__(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        with self._lock:
            try:
                return self._call(join, compiled, tensors)
            except jax.errors.JaxRuntimeError as error:
                if not _OUT_OF_MEMORY.search(str(error)):
                    raise
            # What torch keeps for later is nothing that JAX can have. XLA allocates before it launches: the other ranks only wait.
            torch.cuda.empty_cache()
            return self._call(join, compiled, tensors)

    def _call(self, join: Join, compiled: Compiled, tensors: Tensors) -> Outcome:
        stream = torch.cuda.current_stream(self._torch_device)
        self._release(stream)
        homes = [torch.empty(shape, dtype=dtype, device=self._torch_device) for shape, dtype in compiled.results]
        # Held until the stream waits for JAX: of a copy that was made for JAX they are the only owners.
        arrays = self.arrays(join, (*tensors, *homes) if self.in_place else tensors, stream)
        return self._settle(compiled.function(*arrays), homes, stream)

    def _release(self, stream: torch.cuda.Stream) -> None:
        """Give JAX back what was copied: what it computes next waits for ``stream``, and that for the copies."""
        if self._copied is not None and self._copied.stream != stream:
            stream.wait_event(self._copied.event)
        self._copied = None

    def arrays(self, join: Join, tensors: Tensors, stream: torch.cuda.Stream) -> list[jax.Array | None]:
        ready = [None if tensor is None else exportable(tensor) for tensor in tensors]
        after: int | None = self.after(stream)  # with the copies that some tensors needed
        arrays: list[jax.Array | None] = []
        for tensor in ready:
            arrays.append(None if tensor is None else join(self.convert.to_array(tensor, after)))
            after = None if tensor is not None else after  # a program waits for all its arguments: the first says when
        return arrays

    def after(self, stream: torch.cuda.Stream) -> int:
        """One of JAX's streams, which waits for ``stream`` from here on."""
        number = self._jax_device.get_stream_for_external_ready_events()
        if number not in self._streams:
            self._streams[number] = torch.cuda.ExternalStream(number, device=self._torch_device)
        self._streams[number].wait_stream(stream)
        return number

    def _settle(self, arrays: list[jax.Array], homes: list[torch.Tensor], stream: torch.cuda.Stream) -> Outcome:
        event, number = torch.cuda.Event(), stream.cuda_stream or DEFAULT_STREAM
        self.convert.to_tensor(arrays[-1], number)  # the stream waits; one program's results are ready together
        # Of results of one form, either may lie in either memory.
        found = {(home.data_ptr(), home.shape, home.dtype): home for home in homes}
        results = [found.get((_pointer(array), home.shape, home.dtype)) for array, home in zip(arrays, homes, strict=True)]
        elsewhere = [array for array, result in zip(arrays, results, strict=True) if result is None]
        self._copied = _Copied(stream, event, elsewhere) if elsewhere else None
        try:
            copies = (self.convert.to_tensor(array, number).clone() for array in elsewhere)
            return Outcome([next(copies) if result is None else result for result in results], event)
        finally:
            event.record(stream)


def _pointer(array: jax.Array) -> int:
    return array.addressable_data(0).unsafe_buffer_pointer()


def _jax_gpu(device: torch.device) -> jax.Device:
    gpus = {gpu.local_hardware_id: gpu for gpu in jax.local_devices(backend="gpu")}
    if device.index not in gpus:
        raise RuntimeError(
            f"JAX must see the GPU of the tensors, {device}, but has only {sorted(gpus)} in this process; each process of a ring "
            "has one GPU: torch.cuda.set_device(local_rank) before the first call"
        )
    return gpus[device.index]
