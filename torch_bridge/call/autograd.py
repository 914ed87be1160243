"""Attention that torch can differentiate: one ``autograd.Function`` for every road, wrapping ``torch.library`` custom ops.

Torch saves plain tensors (the operands, the output, the LSE), so checkpointing and offload hooks work as for any operator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd.function import once_differentiable

from jax_core.masks.plan import Plan
from torch_bridge.attention.operands import gather
from torch_bridge.attention.request import ARRAYS, QKV, Forms, Where
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.interface import Operators, Program
from torch_bridge.call.call_cache import PLAIN, Repeat, observed
from torch_bridge.call.operators import backward_op, forward_op
from torch_bridge.call.programs import Names, Settings, describe, program_for, program_of
from torch_bridge.job.ring import Tensors


def differentiable_attention(
    where: Where,
    tensors: dict[str, torch.Tensor | None],
    dropout_seed: int | torch.Tensor | None,
    names: Names = (),
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards, computed by the road of the query's device.

    ``where``: mesh and mesh dimension, as the road's ``resolve`` takes them. ``tensors``: keyed by the field names of
    :class:`jax_core.strategies.contract.Operands`; query, key and value are ``[batch, seq, heads, dim]``, ids of any integer dtype.
    ``dropout_seed``: 64 bits, or a tensor of one integer, which is not read here. ``options``: the fields of :class:`Options`.
    ``names``: the argument names to use in errors.
    """
    # JAX traces a mask function anew in every call, so torch.compile must not trace that call.
    run = _call if options["mask_mod"] is None else _untraced_call
    return run(where, tensors, dropout_seed, names, options)


def _call(
    where: Where,
    tensors: dict[str, torch.Tensor | None],
    dropout_seed: int | torch.Tensor | None,
    names: Names,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    query = tensors["query"]
    assert query is not None
    options, arrays = gather(backend_of(query.device), where, tensors, dropout_seed, options)
    call = _described(where, _constants(options), query.device, names)
    if torch.compiler.is_compiling():
        return _Attention.apply(call, None, *_distinct(arrays))
    if _are_functorch_transforms_active():
        return _Transformable.apply(call, *arrays)
    return _Attention.apply(call, None, *arrays)


_untraced_call = torch.compiler.disable(_call)


def _distinct(arrays: Tensors) -> Tensors:
    """Dynamo cannot trace an autograd function that takes the same tensor twice; queries and keys often share their ids."""
    twice = [x is not None and any(x is other for other in arrays[:place]) for place, x in enumerate(arrays)]
    return tuple(x.view_as(x) if x is not None and again else x for x, again in zip(arrays, twice, strict=True))


def _constants(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A plan is given by its name: torch.compile passes text to what it does not trace, and no dataclass."""
    layout = options["layout"]
    return tuple((options | {"layout": layout.name if isinstance(layout, Plan) else layout}).items())


@torch.compiler.assume_constant_result
def _described(where: Where, settings: Settings, device: torch.device, names: Names) -> str:
    """The call in words; under ``torch.compile`` made once, while tracing."""
    return describe(backend_of(device).resolve(*where), settings, names)


def repetition(where: Where, tensors: dict[str, torch.Tensor | None], names: Names, options: dict[str, Any]) -> Repeat:
    """A call that has been made, as a function of other tensors of the same forms. For calls whose operands are these tensors."""
    query = tensors["query"]
    assert query is not None
    call = _described(where, _constants(options), query.device, names)
    program = program_of(call, [tensors.get(name) for name in ARRAYS])
    last = max(number for number, name in enumerate(ARRAYS) if tensors.get(name) is not None)
    names_given = ARRAYS[: last + 1]  # each further argument of an autograd function takes time, also a None
    absent = (None,) * (len(ARRAYS) - last - 1)

    def repeat(tensors: dict[str, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        operands = tuple(map(tensors.get, names_given))
        if torch.is_grad_enabled():
            return _Attention.apply(call, program, *operands)
        return program.forward((*operands, *absent))  # nothing is to be saved, so torch need not know

    return repeat


class _Attention(torch.autograd.Function):
    """Forward and backward outside of torch's function transforms. ``program``: None if it has to be looked up. Operands that are
    absent may be left out at the end."""

    @staticmethod
    def forward(ctx, call: str, program: Program | None, *operands: torch.Tensor | None):
        operands += (None,) * (len(ARRAYS) - len(operands))
        if program is None and _unobserved(operands):
            program = program_of(call, operands)
        out, lse = _forward(call, operands) if program is None else program.forward(operands)
        ctx.program = program
        _save(ctx, call, operands, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        saved = ctx.saved_tensors  # looked at once: a checkpoint makes them again at the first look, and refuses a second
        direct = ctx.program is not None and _unobserved((*saved, dout, dlse))
        run = ctx.program.backward if direct else partial(_backward, ctx.call)
        return None, None, *_gradients(ctx.needs_input_grad[2:], saved, dout, dlse, run)


class _Transformable(torch.autograd.Function):
    """The same for ``torch.func``, in the form that it asks for, which costs every call more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: str, *operands: torch.Tensor | None):
        return _forward(call, operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *operands = inputs
        _save(ctx, call, operands, *output)

    @staticmethod
    def backward(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        def once(operands: Tensors, *results: Any) -> tuple[torch.Tensor, ...]:
            *tensors, made = results
            return _Once.apply(ctx.call, len(operands), tuple(made), *operands, *tensors)

        return None, *_gradients(ctx.needs_input_grad[1:], ctx.saved_tensors, dout, dlse, once)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "ring_attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian); JAX computes its gradients, once and "
            "in reverse mode: use torch.func.grad, vjp or jacrev"
        )


class _Once(torch.autograd.Function):
    """A backward that has none itself: ``once_differentiable`` would give zeros under nested transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: str, count: int, made: tuple[int, ...], *tensors: torch.Tensor | None):
        return tuple(_backward(call, tensors[:count], *tensors[count:], made))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError(
            "ring_attention can be differentiated once: JAX computes its gradients, and torch sees no further"
        )

    @staticmethod
    def jvp(ctx, *tangents):
        _Transformable.jvp(ctx, *tangents)


def _gradients(
    needed: Sequence[bool],
    saved: Tensors,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    backward: Callable[..., Sequence[torch.Tensor]],
) -> list[torch.Tensor | None]:
    *operands, out, lse = saved
    assert out is not None
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = [number for number, need in enumerate(needed) if need]
    # Always include query, key and value: what is sent must not depend on which gradients a rank needs.
    made = sorted({*QKV, *wanted})
    gradients = dict(zip(made, backward(operands, out, lse, dout, dlse, made), strict=True))
    return [gradients[number] if need else None for number, need in enumerate(needed)]


def _save(ctx, call: str, operands: Tensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    ctx.save_for_backward(*operands, out, lse)
    ctx.set_materialize_grads(False)  # an unused LSE gets no gradient, rather than one of zeros
    ctx.call = call


def _forward(call: str, operands: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    own = _own_operators(call, operands)
    return forward_op(operands, call) if own is None else own.forward(operands)


def _backward(call: str, operands: Tensors, *results: Any) -> list[torch.Tensor]:
    own = _own_operators(call, operands)
    return backward_op(operands, *results, call) if own is None else own.backward(operands, *results)


def _own_operators(call: str, operands: Tensors) -> Operators | None:
    """The program's own custom ops, on a road that has them. They are for one set of shapes: a length that torch.compile holds for
    variable is fixed here."""
    query = operands[0]
    assert query is not None
    operators = backend_of(query.device).OPERATORS
    if operators is None:
        return None
    forms = tuple(None if x is None else (tuple(map(index, x.shape)), x.dtype) for x in operands)
    number = _number_of_operators(call, forms, query.device)
    return None if number is None else Operators(partial(operators.forward, number), partial(operators.backward, number))


@torch.compiler.assume_constant_result
def _number_of_operators(call: str, forms: Forms, device: torch.device) -> int | None:
    return program_for(call, forms, device).operators


def _unobserved(tensors: Tensors) -> bool:
    """Whether nothing needs to see the custom op: no tracing, no function transform, no dispatch mode, no profiler, no tensor
    subclass. Going through torch's dispatcher takes longer than passing the tensors to JAX and back."""
    return not observed() and PLAIN.issuperset(map(type, tensors))
