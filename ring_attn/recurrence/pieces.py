"""An operator of torch's on the pieces of a shard: what it computes before a piece knows the state that enters it, and after.

A piece is affine in that state: ``S_out = M S_in + E``. Its maps go round the ring, and the operator computes its output from
``S_in``. A backward comes the other way: the output's cotangent tells ``S_in``'s, the ring those of ``S_out``, and the operator's
own backward goes from ``S_in``, for both. The maps themselves are not differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_bridge.call.busy import busy
from torch_bridge.call.refusal import Refused
from torch_bridge.recurrence.operation import accumulation
from torch_bridge.tracing import untraced

Tensors = Sequence[Any]  # tensors, or None for an absent one
Operator = Callable[..., tuple[Tensor, Tensor]]  # its output and the final state


class Steps(Protocol):
    """An operator's, of one call. Each hands on to the next, as its last result, what that one takes first. States are ``[pieces,
    heads, key_dim, value_dim]``, in float32 (float64 of float64)."""

    def maps(self, operands: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        """``M [pieces, heads (, key_dim, key_dim)]`` and ``E``, like a state, of operands ``[pieces, tokens, ...]``."""
        ...

    def output(self, kept: Tensors, entering: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensors]:
        """``wanted``: of which operands a backward will want the gradients; until then torch saves what is handed on."""
        ...

    def back_to_state(self, kept: Tensors, entering: Tensor, dy: Tensor) -> tuple[Tensor, Tensors]:
        """The cotangent of the states that enter, as far as it comes through the output."""
        ...

    def back_to_operands(
        self, kept: Tensors, entering: Tensor, dy: Tensor, dleft: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Those of the operands, for those of the output and of the states that leave."""
        ...


# Of M and E of this rank's pieces: the states that enter them, and the one that leaves the sequence.
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@untraced
def around_ring(name: str, steps: Steps, exchange: Exchange, operands: Tensors) -> tuple[Tensor, Tensor]:
    """The output, and the state that leaves the sequence. ``name``: of the layer by an operator, in words."""
    call = _Call(name, steps)
    with torch.cuda.device_of(operands[0]):  # where kernels are launched
        origin = _Origin.apply(*operands)
        m, e = _Before.apply(call, origin, *operands)
        entering, last = exchange(m, e)
        results: tuple[Tensor, Tensor] = _After.apply(call, torch.is_grad_enabled(), origin, entering, last)
    return results


class _Call:
    """One call's way. ``wanted``: of the gradients. ``kept``: from one step to the next, where torch saves nothing in between."""

    def __init__(self, name: str, steps: Steps) -> None:
        self.name, self.steps = name, steps
        self.wanted: tuple[bool, ...] = ()
        self.kept: Tensors = ()


class _Origin(torch.autograd.Function):
    """Nothing, of the operands: what gradients depend on, for torch to know where they are differentiated again (and refused)."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor | None) -> Tensor:
        ctx.count = len(operands)
        return next(x for x in operands if x is not None).new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: object) -> tuple[None, ...]:
        return (None,) * ctx.count


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, origin: Tensor, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        m, e, call.kept = call.steps.maps([None if x is None else x.detach() for x in operands])
        ctx.call, call.wanted, ctx.autocast = call, tuple(ctx.needs_input_grad[2:]), _autocast(e)
        ctx.save_for_backward(origin)
        ctx.mark_non_differentiable(m)
        return m, e

    @staticmethod
    def backward(ctx: Any, _: object, dleft: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        (kept, entering, dy), call.kept = call.kept, ()
        with busy(), torch.no_grad(), torch.autocast(*ctx.autocast):  # it may tune itself for minutes
            gradients = call.steps.back_to_operands(kept, entering, dy, dleft, call.wanted)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = Refused.apply(call.name, len(gradients), *gradients, *ctx.saved_tensors, dy, dleft)
        return None, None, *gradients


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, recorded: bool, origin: Tensor, entering: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        (kept, call.kept), entering = (call.kept, ()), entering.detach()
        y, kept = call.steps.output(kept, entering, [want and recorded for want in call.wanted])
        ctx.call, ctx.autocast = call, _autocast(entering)
        ctx.save_for_backward(origin, entering, *kept)
        return y, last.view_as(last)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        call, (origin, entering, *kept) = ctx.call, ctx.saved_tensors
        with busy(), torch.no_grad(), torch.autocast(*ctx.autocast):
            direct, kept = call.steps.back_to_state(kept, entering, dy)
        if any(call.wanted):
            call.kept = kept, entering, dy
        direct = direct.to(entering.dtype)
        if torch.is_grad_enabled():
            (direct,) = Refused.apply(call.name, 1, direct, origin, dy)
        return None, None, None, direct, dlast


def _autocast(x: Tensor) -> tuple[str, torch.dtype, bool]:
    kind = x.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


class Recorded:
    """A call of an operator that torch differentiates, by itself: ``results`` of ``leaves``, copies of its operands."""

    def __init__(self, operator: Operator, operands: Tensors, wanted: Sequence[bool]) -> None:
        with torch.enable_grad():
            pairs = zip(operands, wanted, strict=True)
            self.leaves = [None if x is None else x.detach().requires_grad_(want) for x, want in pairs]
            self.results = operator(*self.leaves)

    def gradients(self, *cotangents: Tensor) -> list[Tensor | None]:
        pairs = [(x, d.to(x.dtype)) for x, d in zip(self.results, cotangents, strict=True) if x.requires_grad]
        # As a checkpoint: of torch.autograd.grad nothing but the leaves is to get a gradient.
        inputs = None if torch.autograd._is_checkpoint_valid() else [x for x in self.leaves if x is not None and x.requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs], inputs=inputs)
        return [None if x is None else x.grad for x in self.leaves]


def checked(y: Tensor, like: Tensor, shape: tuple[int, ...], left: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(y, Tensor) or not isinstance(left, Tensor) or y.shape != like.shape or left.shape != shape:
        got = " and ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in (y, left))
        raise ValueError(
            f"operator must return its output {list(like.shape)} and its final state {list(shape)}, as fla's of delta rules and "
            f"mamba_ssm's of state space models do; got {got}"
        )
    return y, left.to(accumulation(like.dtype))
