"""Keyword arguments that another library's attention takes under another name: the TypeError says what they are here."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Others = Mapping[str, str]  # other functions' argument names, each with this function's name for it, or with words
NO_OTHERS: Others = MappingProxyType({})


def explains(others: Others) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose users know others like it: an unexpected keyword argument is the TypeError that Python raises,
    with an explanation. Nothing is done before there is an error."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if (better := explained(error, function, kwargs, others)) is error:
                    raise
                raise better from None

        return call

    return decorate


def explained(error: Exception, function: Callable[..., Any], keywords: Mapping[str, object], others: Others) -> Exception:
    """The error of a call with these keyword arguments, in words of ours where it is that some of them are unexpected."""
    parameters = signature(function).parameters
    names = tuple(parameters)
    unknown = [name for name in keywords if name not in parameters]
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or not unknown or not isinstance(error, TypeError):
        return error
    return TypeError(f"{function.__qualname__}() {'; '.join(_unexpected(name, names, others) for name in unknown)}")


def _unexpected(name: str, names: tuple[str, ...], others: Others) -> str:
    unexpected = f"got an unexpected keyword argument {name!r}"
    if name in others:
        other = others[name]
        return f"{unexpected}, " + (f"which is called {other} here" if other in names else other)
    close = get_close_matches(name, names, n=1)
    return f"{unexpected}. Did you mean {close[0]!r}?" if close else unexpected
