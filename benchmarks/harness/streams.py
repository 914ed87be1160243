"""What a GPU's streams did, as torch's profiler saw it: every kernel, copy and collective of this process, JAX's too."""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.team import ON_GPU


class Event(NamedTuple):
    """Something that a stream did; times in microseconds."""

    stream: str
    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length

    @property
    def tenths(self) -> slice:
        """Of a microsecond: its place in an array that has an element for each."""
        return slice(round(10 * self.start), round(10 * self.end))

    @property
    def is_rotation(self) -> bool:
        """Or another collective."""
        return "nccl" in self.name.lower()

    @property
    def is_copy(self) -> bool:
        return self.name.lower().startswith(("memcpy", "memset"))

    @property
    def is_kernel(self) -> bool:
        return not (self.is_rotation or self.is_copy)

    @property
    def is_attention(self) -> bool:
        """By the names of cuDNN's, flash-attn's and our Triton kernels; not those that only prepare or convert."""
        found = re.search(r"sdpa|flash|^(forward|keys|queries)_kernel", self.name, re.IGNORECASE)
        return bool(found) and not re.search(r"process|dot_do_o|convert", self.name, re.IGNORECASE)

    @property
    def is_backward(self) -> bool:
        """Of attention's kernels."""
        return bool(re.search(r"bwd|bprop|backward|^(keys|queries)_kernel", self.name, re.IGNORECASE))

    @property
    def is_product(self) -> bool:
        """By the names of cuBLAS' and CUTLASS' matrix products."""
        return bool(re.search(r"gemm|nvjet|cublas", self.name, re.IGNORECASE))


def recorded(call: Callable[[], Any], ready: Callable[[], None]) -> list[Event]:
    """What the GPU does from ``call``'s begin until all are ``ready``; nothing without a GPU."""
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as profiler:
        ready()
        call()
        ready()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return events_of(json.loads(Path(folder, "trace.json").read_text()))


def events_of(trace: dict[str, Any]) -> list[Event]:
    """The events of the GPU's streams, sorted by time, starting at 0."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    first = min((event["ts"] for event in found), default=0.0)
    events = [Event(str(e["args"]["stream"]), e["name"], round(float(e["ts"] - first), 3), float(e["dur"])) for e in found]
    return sorted(events, key=lambda event: event.start)


def split(events: list[Event], kind: Callable[[Event], str], kinds: Sequence[str]) -> dict[str, float]:
    """Milliseconds of the span, each moment counted once: as the first of ``kinds`` that an event of it has, or as the last, where
    nothing ran."""
    moments = np.full(round(10 * max((event.end for event in events), default=0.0)), len(kinds) - 1, np.int8)
    for event in events:
        np.minimum(moments[event.tenths], kinds.index(kind(event)), out=moments[event.tenths])
    return {f"{name} ms": int((moments == number).sum()) / 10_000 for number, name in enumerate(kinds)}
