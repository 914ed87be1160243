"""Reports one rank's errors to the other ranks of its ring, which would otherwise wait for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.utils.checkpoint

from jax_core.keywords import NO_OTHERS, Others, clearer_error
from torch_bridge.backends.capture import is_captured
from torch_bridge.failures import peers
from torch_bridge.failures.watchdog import PeerFailure, tell_failure
from torch_bridge.mesh.protocol import AnyRing
from torch_bridge.mesh.rings import MeshArg, ProcessRing, resolve
from torch_bridge.start.runtime import refused, start

# Activation checkpointing stops a recomputation by an exception as soon as it has what it needs: after the ring call has ended.
_NO_FAILURES = (PeerFailure, getattr(torch.utils.checkpoint, "_StopRecomputationError", PeerFailure))
P = ParamSpec("P")
R = TypeVar("R")


def propagates_errors(
    where: Callable[..., MeshArg | None], others: Others = NO_OTHERS
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that is a ring call from its first check on: an error on this rank is reported to the others, which
    raise ValueError with its message instead of waiting. ``where`` extracts mesh and mesh dimension from the function's arguments,
    or None if the ring cannot be known from them. ``others``: argument names of functions like it, for the TypeError of an
    unexpected one (:mod:`jax_core.keywords`).

    While torch.compile traces the function, the functions it calls report their own errors (:func:`propagating`).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            entered = peers.mark_busy()
            try:
                return function(*args, **kwargs)
            except _NO_FAILURES:
                raise
            except Exception as raised:
                error = clearer_error(raised, function, kwargs, others)
                try:
                    with suppress(ValueError):  # not a valid mesh: it is unknown which ranks this call was meant for
                        mesh = where(*args, **kwargs)
                        if mesh is not None:
                            _tell(resolve(*mesh), _device((*args, *kwargs.values())), error)
                    if error is raised:
                        raise
                    raise error from None
                finally:
                    del error  # it holds this frame, and with it the call's tensors, until Python's garbage collection
            finally:
                peers.mark_idle(entered)

        return call

    return decorate


@contextmanager
def propagating(ring: AnyRing, device: torch.device) -> Iterator[None]:
    """Wraps a part of a ring call that may fail on this rank alone, and reports the error as :func:`propagates_errors` does."""
    try:
        yield
    except Exception as error:
        _tell(ring, device, error)
        raise


def _device(arguments: tuple[object, ...]) -> torch.device | None:
    return next((x.device for x in arguments if isinstance(x, torch.Tensor)), None)


def _tell(ring: AnyRing, device: torch.device | None, error: Exception) -> None:
    if ring.size == 1 or isinstance(error, _NO_FAILURES) or refused() or (device and device.type in ("xla", "tpu")):
        return
    if device is not None and is_captured(device):  # nobody waits for what is not run; who captures tells it
        return
    assert isinstance(ring, ProcessRing)
    usable = device if device is not None and device.type in ("cpu", "cuda") else None
    try:
        start(ring, device=usable)  # if this is the first call, the others are waiting in it
    except Exception as problem:  # whatever it is, the user must see the error
        error.add_note(f"The other ranks could not be told: {problem}")
    else:
        tell_failure(ring, error)
