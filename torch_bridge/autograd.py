"""Attention that torch can differentiate: one ``autograd.Function`` for every road, wrapping ``torch.library`` custom ops.

Torch saves plain tensors (the operands, the output, the LSE), so checkpointing and offload hooks work as for any operator.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from jax_core.request.options import Options
from torch_bridge.announced import telling
from torch_bridge.empty import Empty
from torch_bridge.operands import gather
from torch_bridge.request import QKV, Form, Request, Where, forms_of
from torch_bridge.ring import Ring, Tensors
from torch_bridge.road import Operators, Program
from torch_bridge.roads import road_of


class _Prepared(NamedTuple):
    request: Request
    program: Program


# A custom op takes tensors and numbers, so a program is passed as its index in this list, which only grows.
_PROGRAMS: list[_Prepared] = []
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
Names = tuple[tuple[str, str], ...]  # the core's name of an argument, and the caller's


def differentiable_attention(
    where: Where, tensors: dict[str, torch.Tensor | None], dropout_seed: int | None, names: Names = (), **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards, computed by the road of the query's device.

    ``where``: mesh and mesh dimension, as the road's ``resolve`` takes them. ``tensors``: keyed by the field names of
    :class:`jax_core.strategies.contract.Operands`; query, key and value are ``[batch, seq, heads, dim]``, ids of any integer dtype.
    ``dropout_seed``: 64 bits. ``options``: the fields of :class:`Options`. ``names``: the argument names to use in errors.
    """
    # JAX traces a mask function anew in every call, so torch.compile must not trace that call.
    run = _call if options["mask_mod"] is None else _untraced_call
    return run(where, tensors, dropout_seed, names, options)


def _call(
    where: Where, tensors: dict[str, torch.Tensor | None], dropout_seed: int | None, names: Names, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    query = tensors["query"]
    assert query is not None
    road = road_of(query.device)
    options, arrays = gather(road, where, tensors, dropout_seed, options)
    if torch.compiler.is_compiling():
        arrays = _distinct(arrays)
    return _Attention.apply(_number(where, options, forms_of(arrays), query.device, names), *arrays)


_untraced_call = torch.compiler.disable(_call)


def _distinct(arrays: Tensors) -> Tensors:
    """Dynamo cannot trace an autograd function that takes the same tensor twice; queries and keys often share their ids."""
    twice = [x is not None and any(x is other for other in arrays[:place]) for place, x in enumerate(arrays)]
    return tuple(x.view_as(x) if x is not None and again else x for x, again in zip(arrays, twice, strict=True))


@torch.compiler.assume_constant_result
def _number(where: Where, options: dict[str, Any], forms: tuple, device: torch.device, names: Names) -> int:
    """The program's index; under ``torch.compile`` it is looked up once, while tracing."""
    return _numbered(road_of(device).resolve(*where), tuple(options.items()), forms, device, names)


@cache
def _numbered(ring: Ring, options: tuple[tuple[str, Any], ...], forms: tuple, device: torch.device, names: Names) -> int:
    request = Request(
        ring=ring,
        options=Options(**dict(options)),
        forms=tuple(None if form is None else Form(*form) for form in forms),
        device=device,
    )
    with telling(ring, device):
        try:
            return _prepared(request)
        except (ValueError, NotImplementedError) as error:
            error.args = (_in_words_of_the_caller(str(error), dict(names)),)
            raise


@cache
def _prepared(request: Request) -> int:
    program = road_of(request.device).program(request)  # also checks the request, even if there is nothing to compute
    _PROGRAMS.append(_Prepared(request, Empty(request) if request.empty else program))
    return len(_PROGRAMS) - 1


def _in_words_of_the_caller(text: str, names: Mapping[str, str]) -> str:
    """The core's error message with its argument names replaced by the caller's."""
    if not names:
        return text
    return re.sub(r"\b(" + "|".join(map(re.escape, names)) + r")\b", lambda found: names[found[0]], text)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number: int, *operands: torch.Tensor | None):
        out, lse = _forward_of(number, operands)(operands)
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)  # an unused LSE gets no gradient, rather than one of zeros
        ctx.number = number
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        *operands, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        # Always include query, key and value: what is sent must not depend on which gradients a rank needs.
        made = sorted({*QKV, *wanted})
        found = _backward_of(ctx.number, (*operands, dout, dlse))(operands, out, lse, dout, dlse, made)
        gradients = dict(zip(made, found, strict=True))
        return None, *(gradients[number] if number in wanted else None for number in range(len(operands)))


def _forward_of(number: int, tensors: Tensors) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if _unobserved(tensors):
        return _PROGRAMS[number].program.forward
    own = _own_operators(number)
    return partial(forward_op, program=number) if own is None else partial(_operators_of(tensors).forward, own)


def _backward_of(number: int, tensors: Tensors) -> Callable[..., list[torch.Tensor]]:
    if _unobserved(tensors):
        return _PROGRAMS[number].program.backward
    own = _own_operators(number)
    return partial(backward_op, program=number) if own is None else partial(_operators_of(tensors).backward, own)


def _operators_of(tensors: Tensors) -> Operators:
    query = tensors[0]
    assert query is not None
    found = road_of(query.device).OPERATORS
    assert found is not None
    return found


@torch.compiler.assume_constant_result
def _own_operators(number: int) -> int | None:
    return _PROGRAMS[number].program.operators


def _unobserved(tensors: Tensors) -> bool:
    """Whether nothing needs to see the custom op: no tracing, no dispatch mode, no profiler, no tensor subclass. Going through
    torch's dispatcher takes longer than passing the tensors to JAX and back."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.autograd._profiler_enabled():
        return False
    return all(type(tensor) in _PLAIN for tensor in tensors)


@torch.library.custom_op("ring_attn::forward", mutates_args=(), schema="(Tensor?[] operands, int program) -> (Tensor, Tensor)")
def forward_op(operands, program):
    return _PROGRAMS[program].program.forward(operands)


@forward_op.register_fake
def _(operands, program):
    out, lse = _PROGRAMS[program].request.results
    return operands[0].new_empty(out.shape), operands[0].new_empty(lse.shape, dtype=lse.dtype)


@torch.library.custom_op(
    "ring_attn::backward",
    mutates_args=(),
    schema="(Tensor?[] operands, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, int[] wanted, int program) -> Tensor[]",
)
def backward_op(operands, out, lse, dout, dlse, wanted, program):
    return _PROGRAMS[program].program.backward(operands, out, lse, dout, dlse, wanted)


@backward_op.register_fake
def _(operands, out, lse, dout, dlse, wanted, program):
    return [operands[number].new_empty(operands[number].shape) for number in wanted]
