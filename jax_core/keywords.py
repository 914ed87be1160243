"""Keyword arguments that another library's attention takes under another name: the TypeError says what they are here."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def explains(others: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose users know others like it. ``others``: other functions' argument names, each with this function's
    name for it, or with words. An unexpected keyword argument is the TypeError that Python would raise, and the explanation."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = tuple(signature(function).parameters)
        known = frozenset(names)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not known.issuperset(kwargs):
                unknown = [name for name in kwargs if name not in known]
                raise TypeError(f"{function.__qualname__}() {'; '.join(_explained(name, names, others) for name in unknown)}")
            return function(*args, **kwargs)

        return call

    return decorate


def _explained(name: str, names: tuple[str, ...], others: Mapping[str, str]) -> str:
    unexpected = f"got an unexpected keyword argument {name!r}"
    if name in others:
        other = others[name]
        return f"{unexpected}, " + (f"which is called {other} here" if other in names else other)
    close = get_close_matches(name, names, n=1)
    return f"{unexpected}. Did you mean {close[0]!r}?" if close else unexpected
