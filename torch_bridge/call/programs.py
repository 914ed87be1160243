"""Calls and their programs. A call is all that a compiled graph may hold: it says nothing about lengths. A program belongs to one
call and one set of shapes, and is looked up by them when the tensors are there: a graph whose lengths change is traced once.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from jax_core.masks.plan import named
from jax_core.request.checks import check_operands
from jax_core.request.options import Options
from jax_core.strategies.contract import Operands
from torch_bridge.attention.empty import Empty
from torch_bridge.attention.request import ARRAYS, QKV, Form, Forms, Request, forms_of, in_words
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.interface import Program
from torch_bridge.call import call_cache
from torch_bridge.job.error_propagation import propagating
from torch_bridge.job.ring import Ring, Tensors, tensors_per_sequence

# Programs of a ring that are kept. The one made first is dropped first: programs are made in the same order on all ranks, because
# making one is a comparison. The order in which they were last used may differ, after a call that failed on one rank.
KEPT = 256
MANY = 16  # shapes of one call after which a warning says that each is compiled
Names = tuple[tuple[str, str], ...]  # the core's name of an argument, and the caller's
Settings = tuple[tuple[str, Any], ...]  # the fields of Options


class Call(NamedTuple):
    """A call without its tensors."""

    ring: Ring
    options: Options
    names: Names


class _Made(NamedTuple):
    request: Request
    program: Program


# Custom ops take tensors, numbers and text, so a call is passed by its description.
_CALLS: dict[str, Call] = {}
_WORDS: dict[tuple[Ring, Settings, Names], str] = {}
_NUMBERS: Counter[str] = Counter()  # how many calls have had one description
_PROGRAMS: dict[tuple[str, Forms, torch.device], _Made] = {}


def describe(ring: Ring, settings: Settings, names: Names) -> str:
    """The call in words, by which its programs are found: equal calls have one description. It means the same in every process,
    for a graph may be saved and loaded; so a call with functions, which may differ under one name, names this process."""
    found = _WORDS.get((ring, settings, names))
    return _describe(ring, settings, names) if found is None else found


def _describe(ring: Ring, settings: Settings, names: Names) -> str:
    options = Options(**dict(settings))
    call = Call(ring, replace(options, layout=named(options.layout)), names)
    words = f"{in_words(call.options)} on {ring}"
    if call.options.predicates or call.options.mask_builder:
        words += f", in process {_process()}"
    _NUMBERS[words] += 1
    words += f", number {_NUMBERS[words]}" if _NUMBERS[words] > 1 else ""
    _CALLS[words] = call
    _WORDS[ring, settings, names] = words
    return words


@cache
def _process() -> str:
    return uuid4().hex


def call_of(words: str) -> Call:
    if words not in _CALLS:
        raise ValueError(
            f"no call of ring_attention in this process is the one in this graph, which another process has exported ({words}); "
            "call ring_attention here once with the same options and ring before the graph, or export it again"
        )
    return _CALLS[words]


def program_of(words: str, tensors: Tensors) -> Program:
    """The program of the call for these tensors, as :func:`program_for`."""
    query = tensors[0]
    assert query is not None
    return program_for(words, forms_of(tensors), query.device)


def program_for(words: str, forms: Forms, device: torch.device) -> Program:
    """The program of the call for tensors of these forms. On a ring of several processes making one is a collective, in which they
    compare their requests. Raises ValueError and NotImplementedError for a request that cannot be, in the caller's words."""
    found = _PROGRAMS.get((words, forms, device))
    return _make(words, forms, device) if found is None else found.program


def _make(words: str, forms: Forms, device: torch.device) -> Program:
    call = call_of(words)
    request = Request(call.ring, call.options, tuple(None if form is None else Form(*form) for form in forms), device)
    with propagating(call.ring, device), _in_words_of_the_caller(call.names):
        program = backend_of(device).program(request)  # also checks the request, even if there is nothing to compute
    made = _Made(request, Empty(request) if request.empty else program)
    _PROGRAMS[words, forms, device] = made
    _drop_the_oldest(call.ring)
    _warn_of_many(words, request)
    return made.program


def _drop_the_oldest(ring: Ring) -> None:
    of_this_ring = [key for key, made in _PROGRAMS.items() if made.request.ring == ring]
    for key in of_this_ring[:-KEPT]:
        call_cache.clear()
        del _PROGRAMS[key]
        _forget_functions(key[0])


def _forget_functions(words: str) -> None:
    """A call with a mask function holds its arrays. Without programs it is dropped too: no compiled graph holds such a call."""
    if _CALLS[words].options.predicates and not any(of == words for of, *_ in _PROGRAMS):
        del _CALLS[words]
        for key in [key for key, named in _WORDS.items() if named == words]:
            del _WORDS[key]


def _warn_of_many(words: str, request: Request) -> None:
    same = [made for (of, *_), made in _PROGRAMS.items() if of == words and _but_lengths(made.request) == _but_lengths(request)]
    if len(same) == MANY:
        warnings.warn(
            f"ring_attention has met {MANY} different lengths or batch sizes in one call; each is a program of its own, which is "
            f"compiled when it is first met (the last {KEPT} of a ring are kept); pad to a few lengths",
            stacklevel=2,
        )


def _but_lengths(request: Request) -> tuple[object, ...]:
    shapes = [None if form is None else (form.shape[2:], form.dtype) for form in request.forms[: len(QKV)]]
    return request.device, *shapes, *(form is None for form in request.forms)


def check(words: str, tensors: Tensors) -> None:
    """Checks shapes and dtypes, which may be symbols, without making a program. Raises ValueError in the caller's words."""
    call, query = call_of(words), tensors[0]
    assert query is not None
    with propagating(call.ring, query.device), _in_words_of_the_caller(call.names):
        forms: Any = tensors[: len(ARRAYS)]
        check_operands(Operands(*forms), call.options.layout, tensors_per_sequence(call.ring))


@contextmanager
def _in_words_of_the_caller(names: Names) -> Iterator[None]:
    """Errors with the core's argument names replaced by the caller's."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        error.args = (renamed(str(error), names),)
        raise


def renamed(text: str, names: Names) -> str:
    if not names:
        return text
    to = dict(names)
    return re.sub(r"\b(" + "|".join(map(re.escape, to)) + r")\b", lambda found: to[found[0]], text)
