"""The refusal of derivatives that do not exist, by whatever road they are asked for."""

from typing import Any, NoReturn

import torch

from torch_bridge.call.programs import call_of


class Refused(torch.autograd.Function):
    """Gradients that cannot be differentiated, the first ``count`` of the tensors. The others are what they depend on: torch asks
    for the derivative by each of those that has one."""

    @staticmethod
    def forward(ctx: Any, key: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.key = key
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: object) -> NoReturn:
        refuse(ctx)

    @staticmethod
    def jvp(ctx: Any, *tangents: object) -> NoReturn:
        refuse_forward_mode(ctx)


def refuse(ctx: Any) -> NoReturn:
    raise NotImplementedError(f"{_name(ctx)} can be differentiated once: JAX computes its gradients, and torch sees no further")


def refuse_forward_mode(ctx: Any) -> NoReturn:
    raise NotImplementedError(
        f"{_name(ctx)} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); JAX computes its gradients, "
        "once and in reverse mode: use torch.func.grad, vjp or jacrev"
    )


def _name(ctx: Any) -> str:
    return call_of(ctx.key).operation.name
