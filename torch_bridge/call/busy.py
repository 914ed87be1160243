"""What runs in torch's backward between two ring calls, and may take minutes at its first call: this rank is busy in it, where it
would count as one that does not come (:mod:`torch_bridge.failures.deadlock`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from torch_bridge.failures import peers

Pair = tuple[Tensor, Tensor]
_live: dict["_Span", object] = {}  # whose backward is under way, and the keys of peers.mark_busy


@contextmanager
def busy() -> Iterator[None]:
    """In all that is within."""
    key = peers.mark_busy()
    try:
        yield
    finally:
        peers.mark_idle(key)


class _Span:
    """One call's backward."""

    def begin(self) -> None:
        if self not in _live:
            _live[self] = peers.mark_busy()

    def end(self) -> None:
        if key := _live.pop(self, None):
            peers.mark_idle(key)


def busy_in_backward(function: Callable[..., Pair]) -> Callable[..., Pair]:
    """``function`` of tensors, by position or by name, in whose backward this rank is busy: from the gradients of its results to
    those of the tensors that it was given."""

    if torch.compiler.is_compiling():
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Pair:
        if torch._C._current_graph_task_id() < 0:  # what is live now is of a backward that has raised
            for span in list(_live):
                span.end()
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        names = [name for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
        if not names or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        span = _Span()
        given |= zip(names, _End.apply(span, *(given[name] for name in names)), strict=True)
        results = function(*(given[number] for number in range(len(args))), **{name: given[name] for name in kwargs})
        return _Begin.apply(span, *results) if all(isinstance(x, Tensor) for x in results) else results

    return call


class _Identity(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(span: _Span, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.span = inputs[0]
        ctx.set_materialize_grads(False)


class _Begin(_Identity):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.span.begin()
        return None, *gradients


class _End(_Identity):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.span.end()
        return None, *gradients
