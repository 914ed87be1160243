"""The refusal of derivatives that do not exist, by whatever road they are asked for."""

import sys
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd import functional

from torch_bridge.backends.operation import Program
from torch_bridge.call.programs import call_of

_SECOND = ("hessian", "hvp", "vhp", "jvp")  # of torch.autograd.functional; jvp is made of two backwards


class Context(Protocol):
    """What torch hands an autograd function of a call. ``program``: if it need not be looked up. Saved are the operands, then the
    results."""

    key: str
    program: Program | None
    saved_tensors: tuple[torch.Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class NoForwardMode(torch.autograd.Function):
    """Refuses the derivative in forward mode."""

    @staticmethod
    def jvp(ctx: Context, *tangents: object) -> NoReturn:
        refuse_forward_mode(name_of(ctx.key))


class NoDerivative(NoForwardMode):
    """Refuses every derivative."""

    @staticmethod
    def backward(ctx: Context, *cotangents: object) -> NoReturn:
        refuse(ctx.key)


class Refused(torch.autograd.Function):
    """Gradients of ``name`` that cannot be differentiated: the first ``count`` of the tensors. The others are what they depend on:
    torch asks for the derivative by each of those that has one."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.name = name
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: object) -> NoReturn:
        refuse_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: object) -> NoReturn:
        refuse_forward_mode(ctx.name)


def refuse(key: str) -> NoReturn:
    refuse_second(name_of(key))


def refuse_second(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} can be differentiated once: JAX computes its gradients, and torch sees no further")


def refuse_forward_mode(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); JAX computes its gradients, once "
        "and in reverse mode: use torch.func.grad, vjp or jacrev"
    )


def name_of(key: str) -> str:
    return call_of(key).operation.name


def refuse_in_compiled(key: str) -> None:
    """Refuses a call in a graph of AOTAutograd whose gradients torch.autograd.functional differentiates. AOTAutograd detaches what
    it saves of views, and functional gives views: the second derivative would be 0, in silence, as that of every such graph."""
    frame: FrameType | None = sys._getframe(1)
    inner: list[FrameType] = []
    while frame is not None and not (frame.f_code.co_name in _SECOND and frame.f_globals is vars(functional)):
        inner.append(frame)
        frame = frame.f_back
    if frame is not None and any(map(_is_differentiated_graph, inner)):
        refuse(key)


def _is_differentiated_graph(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return frame.f_code.co_name == "forward" and module.startswith("torch._functorch._aot_autograd")
