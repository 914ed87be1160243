"""Calls and their programs. A call's key is all that a compiled graph may hold: it says nothing about lengths. A program belongs to
one call and one set of shapes, and is looked up by them when the tensors are there: a graph whose lengths change is traced once.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import NamedTuple
from uuid import uuid4

import torch

from torch_bridge.backends import capture
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.operation import Operation, Program, Request, TensorSpec, TensorSpecs, specs_of
from torch_bridge.call import call_cache
from torch_bridge.call.error_propagation import propagating
from torch_bridge.mesh.protocol import AnyRing, Tensors
from torch_bridge.mesh.rings import has_ended
from torch_bridge.mesh.trial import current, note_dtype, note_ring

# Programs of a ring that are kept. The one made first is dropped first: programs are made in the same order on all ranks, because
# making one is a comparison. The order in which they were last used may differ, after a call that failed on one rank.
MOST_PROGRAMS = 256
MANY = 16  # shapes of one call after which a warning says that each is compiled
Names = tuple[tuple[str, str], ...]  # the operation's name of an argument, and the caller's


class CallSpec(NamedTuple):
    """A call without its tensors."""

    ring: AnyRing
    operation: Operation


class _CachedProgram(NamedTuple):
    request: Request
    program: Program


# Custom ops take tensors, numbers and text, so a call is passed by its key.
_CALLS: dict[str, CallSpec] = {}
_KEYS: dict[CallSpec, str] = {}
_NAMES: dict[str, Names] = {}  # by which the caller who described the call last knows its arguments, for errors
_NUMBERS: Counter[str] = Counter()  # how many calls have had one description
_PROGRAMS: dict[tuple[str, TensorSpecs, torch.device], _CachedProgram] = {}
_lock = RLock()  # threads describe calls and make programs at once; not held while one is made, which may wait for other ranks


def describe(ring: AnyRing, operation: Operation, names: Names) -> str:
    """The call's key, by which its programs are found: equal calls have one. It means the same in every process, for a graph may be
    saved and loaded; so a call with functions, which may differ under one name, names this process."""
    call = CallSpec(ring, operation)
    with _lock:
        existing = _KEYS.get(call)
        if existing is not None and has_ended(_CALLS[existing].ring):
            _begin_anew(existing, call)
        key = _describe(call) if existing is None else existing
        _NAMES[key] = names
    return key


def _begin_anew(key: str, call: CallSpec) -> None:
    """With the ring's present process groups, and programs of these."""
    del _KEYS[_CALLS[key]]
    _CALLS[key], _KEYS[call] = call, key
    call_cache.clear()
    for of_ended in [each for each in _PROGRAMS if each[0] == key]:
        del _PROGRAMS[of_ended]


def _describe(call: CallSpec) -> str:
    key = f"{call.operation} on {call.ring}"
    if call.operation.is_process_local:
        key += f", in process {_process()}"
    _NUMBERS[key] += 1
    key += f", number {_NUMBERS[key]}" if _NUMBERS[key] > 1 else ""
    _CALLS[key] = call
    _KEYS[call] = key
    return key


@cache
def _process() -> str:
    return uuid4().hex


def call_of(key: str) -> CallSpec:
    if key not in _CALLS:
        raise ValueError(
            f"no call of ring_attention in this process is the one in this graph, which another process has exported ({key}); "
            "call ring_attention here once with the same options and ring before the graph, or export it again"
        )
    return _CALLS[key]


def program_of(key: str, tensors: Tensors) -> Program:
    """The program of the call for these tensors, as :func:`program_for`."""
    first = tensors[0]
    assert first is not None
    return program_for(key, specs_of(tensors), first.device)


def program_for(key: str, specs: TensorSpecs, device: torch.device) -> Program:
    """The program of the call for tensors of these specs. On a ring of several processes making one is a collective, in which they
    compare their requests. Raises ValueError and NotImplementedError for a request that cannot be, in the caller's words."""
    if current() is not None:
        _note(key, specs)
    entry = _PROGRAMS.get((key, specs, device))
    return _make(key, specs, device) if entry is None else entry.program


def _note(key: str, specs: TensorSpecs) -> None:
    first = specs[0]
    assert first is not None
    note_ring(tuple(getattr(call_of(key).ring, "ranks", ())))
    note_dtype(first[1])


def cached_program(key: str, request: Request) -> Program | None:
    """The program of the request, if a call has made it."""
    entry = _PROGRAMS.get((key, request.specs, request.device))
    return None if entry is None else entry.program


def last_on(ring: AnyRing) -> Program | None:
    """The program that was made last for the ring, of those that are kept."""
    with _lock:
        return next((entry.program for entry in reversed(_PROGRAMS.values()) if entry.request.ring == ring), None)


def request_of(key: str, specs: TensorSpecs, device: torch.device) -> Request:
    call = call_of(key)
    return Request(call.ring, call.operation, tuple(None if spec is None else TensorSpec(*spec) for spec in specs), device)


def _make(key: str, specs: TensorSpecs, device: torch.device) -> Program:
    call, request = call_of(key), request_of(key, specs, device)
    if capture.is_captured(device):
        raise RuntimeError(capture.FIRST_CALL)
    with propagating(call.ring, device), with_caller_names(key):
        program = backend_of(device).program(request)  # also checks the request, even if there is nothing to compute
    entry = _CachedProgram(request, request.operation.in_torch(request, program) or program)
    with _lock:
        _PROGRAMS[key, specs, device] = entry
        _drop_the_oldest(call.ring)
        _warn_of_many(key, request)
    return entry.program


def _drop_the_oldest(ring: AnyRing) -> None:
    of_this_ring = [each for each, entry in _PROGRAMS.items() if entry.request.ring == ring]
    for oldest in of_this_ring[:-MOST_PROGRAMS]:
        call_cache.clear()
        del _PROGRAMS[oldest]
        _drop_arrays(oldest[0])


def _drop_arrays(key: str) -> None:
    """Without programs a call that holds arrays is dropped too."""
    call = _CALLS[key]
    if call.operation.captures_arrays and not any(of == key for of, *_ in _PROGRAMS):
        del _CALLS[key], _KEYS[call], _NAMES[key]


def _warn_of_many(key: str, request: Request) -> None:
    same = [entry for (of, *_), entry in _PROGRAMS.items() if of == key and _but_lengths(entry.request) == _but_lengths(request)]
    if len(same) == MANY:
        warnings.warn(
            f"{request.operation.name} has met {MANY} different lengths or batch sizes in one call; each is a program of its "
            f"own, which is compiled when it is first met (the last {MOST_PROGRAMS} of a ring are kept); pad to a few lengths",
            stacklevel=2,
        )


def _but_lengths(request: Request) -> tuple[object, ...]:
    return request.device, request.operation.fixed(request.specs)


def check(key: str, tensors: Tensors) -> None:
    """Checks shapes and dtypes, which may be symbols, without making a program. Raises ValueError in the caller's words."""
    call, first = call_of(key), tensors[0]
    assert first is not None
    with propagating(call.ring, first.device), with_caller_names(key):
        call.operation.check(tensors, call.ring)


@contextmanager
def with_caller_names(key: str) -> Iterator[None]:
    """Errors with the operation's argument names replaced by the caller's."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        error.args = (rename_args(str(error), _NAMES[key]),)
        raise


def rename_args(text: str, names: Names) -> str:
    if not names:
        return text
    to = dict(names)
    return re.sub(r"\b(" + "|".join(map(re.escape, to)) + r")\b", lambda match: to[match[0]], text)
