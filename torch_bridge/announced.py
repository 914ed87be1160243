"""The errors of one rank, told to the others of its ring, which would wait for it."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from torch_bridge import peers
from torch_bridge.calls import PeerFailure, tell_failure
from torch_bridge.mesh import resolve
from torch_bridge.runtime import refused, start

Where = tuple[Any, str | int | None]  # mesh and mesh dimension, as torch_bridge.mesh.resolve takes them
P = ParamSpec("P")
R = TypeVar("R")


class ring_call:
    """Around the whole of a ring call, its checks included: an error of this rank is told to the others, which raise ValueError
    with its words instead of waiting for this rank.

    ``where``: mesh and mesh dimension. ``device``: that of the tensors, None where there are none. A ring of one tells nobody.
    """

    __slots__ = ("device", "where")

    def __init__(self, where: Where, device: torch.device | None) -> None:
        self.where, self.device = where, device

    def __enter__(self) -> None:
        peers.prepare(id(self))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, PeerFailure):
                self._tell(error)
        finally:
            peers.prepared(id(self))

    def _tell(self, error: Exception) -> None:
        try:
            ring = resolve(*self.where)
        except ValueError:
            return  # nobody knows whom this rank meant to call
        device = self.device if self.device is not None and self.device.type in ("cpu", "cuda") else None
        if ring.size == 1 or refused() or device != self.device:
            return
        with suppress(PeerFailure):  # the others may have gone: then there is nobody to tell
            start(ring, device=device)  # where the others are, if this is the first call
            tell_failure(ring, error)


def announced(where: Callable[..., Where]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of functions whose whole call is a :class:`ring_call`; ``where`` finds mesh and mesh dimension in its arguments.

    While torch.compile traces the function, what it calls says itself where it may fail.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
            with ring_call(where(*args, **kwargs), device):
                return function(*args, **kwargs)

        return call

    return decorate
