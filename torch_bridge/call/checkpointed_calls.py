"""Results of calls that activation checkpointing need not compute again.

A checkpoint runs its function twice: in the forward, and again in the backward, to make what the backward needs. The results of
ring calls in the first run are kept, in their order, and serve the second: no program runs twice, and no collective.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from torch_bridge.backends.operation import Results
from torch_bridge.call.counting import tell
from torch_bridge.call.host_copy import HostCopy
from torch_bridge.call.programs import call_of
from torch_bridge.mesh.protocol import Tensors

_OTHER_CALLS = (
    "activation checkpointing runs its function again in the backward, and its ring calls must be those of the first run, in their "
    "order: call {number} was {first}, and is {second} now. Make the function deterministic, or have attention computed again "
    "(without context_fn; checkpoint=None)"
)


class _SavedCall(NamedTuple):
    """One call's: what it was, its results, and their versions, which change in place with them."""

    key: str
    shapes: tuple[torch.Size | None, ...]
    results: tuple[Tensor | HostCopy, ...]
    versions: tuple[int, ...]

    def values(self) -> Results:
        """Tensors of their own, over the same memory."""
        return tuple(x.on_device() if isinstance(x, HostCopy) else x.detach() for x in self.results)


class CheckpointedCalls:
    """The ring calls of one checkpoint. ``offload``: results wait in pinned host memory, on the way while later layers compute."""

    def __init__(self, offload: bool = False) -> None:
        self._offload = offload
        self._calls: list[_SavedCall] = []
        self._earlier = _last_of_this_thread(self) if offload else lambda: None

    @contextmanager
    def first_run(self) -> Iterator[None]:
        with _running(_Run(self, again=False)):
            yield

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """May be entered again: a graph that is retained is recomputed by each backward."""
        self.fetch()
        if (earlier := self._earlier()) is not None:  # whose turn is next
            earlier.fetch()
        with _running(_Run(self, again=True)):
            yield

    def fetch(self) -> None:
        """Starts to bring back what waits on the host."""
        for call in self._calls:
            for result in call.results:
                if isinstance(result, HostCopy):
                    result.fetch()

    def forget(self) -> None:
        self._calls.clear()

    def save(self, key: str, operands: Tensors, results: Results) -> None:
        versions = tuple(x._version for x in results)
        saved = tuple(HostCopy(x) if self._offload and x.device.type == "cuda" else x.detach() for x in results)
        self._calls.append(_SavedCall(key, _shapes(operands), saved, versions))

    def saved(self, number: int, key: str, operands: Tensors) -> Results:
        """Raises RuntimeError where the first run made another call, or its result was changed in place since."""
        first = self._calls[number] if number < len(self._calls) else None
        if first is None or (first.key, first.shapes) != (key, _shapes(operands)):
            earlier = "none" if first is None else _description(first.key, first.shapes)
            raise RuntimeError(_OTHER_CALLS.format(number=number + 1, first=earlier, second=_description(key, _shapes(operands))))
        for result, version in zip(first.results, first.versions, strict=True):
            if isinstance(result, Tensor) and result._version != version:
                raise RuntimeError(
                    "a result that is kept for the recomputation of a checkpoint was changed in place since; change a copy of it"
                )
        return first.values()


class _Run:
    """One run of a checkpoint's function, and that around it, if checkpoints are nested."""

    def __init__(self, calls: CheckpointedCalls, again: bool) -> None:
        self.calls, self.again, self.number = calls, again, 0
        self.outer: _Run | None = None

    def results(self, key: str, operands: Tensors, compute: Callable[[], Results]) -> Results:
        if self.again:
            self.number += 1
            return self.calls.saved(self.number - 1, key, operands)
        results = compute() if self.outer is None else self.outer.results(key, operands, compute)
        self.calls.save(key, operands, results)
        return results


class _OfThisThread(threading.local):
    """A backward runs on threads of its own."""

    run: _Run | None = None
    offloaded: "ref[CheckpointedCalls] | None" = None


_here = _OfThisThread()


def results_of(key: str, operands: Tensors, compute: Callable[[], Results], copied: bool = False) -> Results:
    """What ``compute`` returns, or returned in the first run of a checkpoint that this is the second of. ``copied``: in memory that
    the caller may overwrite, also where torch does not see it."""
    tell()
    run = _here.run
    if run is None:
        return compute()
    with _running(None):  # the custom op, by which ``compute`` may go, asks again
        results = run.results(key, operands, compute)
        return tuple(x.clone() for x in results) if copied else results


@contextmanager
def _running(run: _Run | None) -> Iterator[None]:
    before = _here.run
    if run is not None:
        run.outer = before
    _here.run = run
    try:
        yield
    finally:
        _here.run = before


def _last_of_this_thread(calls: CheckpointedCalls) -> "Callable[[], CheckpointedCalls | None]":
    before, _here.offloaded = _here.offloaded, ref(calls)
    return (lambda: None) if before is None else before


def _shapes(operands: Tensors) -> tuple[torch.Size | None, ...]:
    shapes = [None if x is None else x.shape for x in operands]
    while shapes and shapes[-1] is None:  # a repeated call leaves out what is absent at the end
        shapes.pop()
    return tuple(shapes)


def _description(key: str, shapes: tuple[torch.Size | None, ...]) -> str:
    return f"{call_of(key).operation.name} of {[list(shape) for shape in shapes if shape is not None]}"
