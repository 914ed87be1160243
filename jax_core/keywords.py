"""Keyword arguments that another library's attention takes under another name: the TypeError says what they are here."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Others = Mapping[str, str]  # other functions' argument names beside SAME, each with this function's name for it, or with words
NO_OTHERS: Others = MappingProxyType({})
# Names of one argument in attention functions: an unexpected one means the one of its group that a function takes.
SAME = tuple(
    group.split()
    for group in (
        "query q",
        "key k",
        "value v",
        "causal is_causal",
        "scale softmax_scale sm_scale",
        "sliding_window window_size local_window_size",
        "softcap logits_soft_cap",
        "sinks softmax_aux learnable_sink s_aux",
        "dropout dropout_p dropout_prob dropout_rate attention_dropout",
        "return_lse return_softmax_lse return_residual",
        "num_kv_heads num_heads_kv num_key_value_heads",
        "mesh device_mesh",
        "mesh_dim axis_name",
    )
)
# Explanations that more than one table of other names has.
BOTH_SIDES = "of which each side has its own here: q_{0} and kv_{0}; one is enough where queries and keys have equal length"
ATTN_MASK = "which is called mask here where it is bool, and bias where it is float"
ENABLE_GQA = "which is not needed: fewer heads of keys and values are seen from the shapes"
PLATFORM = 'which is called platform here: "xla", "triton", "cudnn", "pallas" or "auto"'


def explains(others: Others) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose users know others like it: an unexpected keyword argument is the TypeError that Python raises,
    with an explanation. Nothing is done before there is an error."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if (better := clearer_error(error, function, kwargs, others)) is error:
                    raise
                raise better from None

        return call

    return decorate


def clearer_error(error: Exception, function: Callable[..., object], keywords: Mapping[str, object], others: Others) -> Exception:
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
    if (same := _same(name, names)) is not None:
        return f"{unexpected}, which is called {same} here"
    close = get_close_matches(name, names, n=1)
    return f"{unexpected}. Did you mean {close[0]!r}?" if close else unexpected


def _same(name: str, names: tuple[str, ...]) -> str | None:
    return next((other for group in SAME if name in group for other in group if other in names), None)
