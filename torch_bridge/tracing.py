"""What torch.compile does with functions of this library: torch.compiler's decorators, but that the compiler, which takes longer to
import than torch itself, is imported where something is compiled and not where they decorate."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Called once, while a graph is traced, which then holds the result: ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: Callable[P, R], recursive: bool = True) -> Callable[P, R]:
    """Never part of a graph; with ``recursive=False`` what it calls may be: ``torch.compiler.disable``."""
    outside = torch._disable_dynamo(recursive=recursive)(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    # The compiler counts how often it has compiled a code, and gives up after a few times: each function has its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    return wraps(function)(call)
