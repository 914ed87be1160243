"""Attention as a torch operator: ``torch.library`` custom ops around the compiled pair, and their ``autograd.Function``.

Torch saves plain tensors (the operands, the output, the LSE), so checkpointing and offload hooks work as for any operator.
"""

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from jax_core.options import Options, both_sides
from jax_core.predicate import from_mask_mod
from jax_core.ring import Operands
from torch_bridge.compiled import ARRAYS, Form, Program, program
from torch_bridge.dlpack import narrow_ids, precision_scope
from torch_bridge.mesh import resolve
from torch_bridge.runtime import start

# An operator's arguments are tensors and numbers; a program goes by its number in this list, which only grows.
_PROGRAMS: list[Program] = []
_NUMBERS: dict[Program, int] = {}


def attend(
    where: tuple[Any, str | int | None], tensors: dict[str, torch.Tensor | None], dropout_seed: int | None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards.

    ``where``: mesh and mesh dimension, as :func:`torch_bridge.mesh.resolve` takes them. ``tensors``: by the names of
    :class:`jax_core.ring.Operands`, queries, keys and values ``[batch, seq, heads, dim]``, ids of any integer type.
    ``options``: the fields of :class:`jax_core.options.Options`.
    """
    ids = {name: narrow_ids(x, name) for name, x in tensors.items() if name.endswith("_ids") and x is not None}
    query = tensors["query"]
    assert query is not None
    named: dict[str, Any] = {**tensors, **ids, "dropout_seed": _seed_words(dropout_seed, query.device)}
    arrays: tuple[Any, ...] = both_sides(Operands(**named))[: len(ARRAYS)]
    if options["mask_mod"] is not None:
        options, arrays = _lift_mask_mod(where, options, arrays)
    forms = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in arrays)
    return _Attention.apply(_number(where, options, forms, query.device), *arrays)


@torch.compiler.disable
def _lift_mask_mod(where, options: dict[str, Any], arrays: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The mask function as it is now: traced, and the arrays that it closes over as further operands."""
    device = arrays[0].device
    start(ring=resolve(*where), device=device)
    with precision_scope(arrays[0].dtype):
        predicate, consts = from_mask_mod(options["mask_mod"])
        further = [torch.from_numpy(np.array(const, ndmin=1)).to(device) for const in consts]
    return {**options, "mask_mod": None, "predicates": (predicate,)}, (*arrays, *further)


def _seed_words(seed: int | None, device: torch.device) -> torch.Tensor | None:
    """64 bits as two int32 words, low first; JAX reads them as unsigned."""
    if seed is None:
        return None
    words = [(seed >> shift) & 0xFFFFFFFF for shift in (0, 32)]
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32, device=device)


@torch.compiler.assume_constant_result
def _number(where: tuple[Any, str | int | None], options: dict[str, Any], forms: tuple, device: torch.device) -> int:
    """The number of the program; under ``torch.compile`` found once, while tracing."""
    signature = tuple(None if form is None else Form(*form) for form in forms)
    found = program(Options(**options), signature, resolve(*where), device)
    if found not in _NUMBERS:
        _NUMBERS[found] = len(_PROGRAMS)
        _PROGRAMS.append(found)
    return _NUMBERS[found]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number: int, *operands: torch.Tensor | None):
        out, lse = forward_op(list(operands), number)
        ctx.save_for_backward(*operands, out, lse)
        ctx.number = number
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor, dlse: torch.Tensor):
        *operands, out, lse = ctx.saved_tensors
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        found = backward_op(operands, out, lse, dout, dlse, wanted, ctx.number)
        gradients = dict(zip(wanted, found, strict=True))
        return None, *(gradients.get(number) for number in range(len(operands)))


@torch.library.custom_op("ring_attn::forward", mutates_args=(), schema="(Tensor?[] operands, int program) -> (Tensor, Tensor)")
def forward_op(operands, program):
    return _PROGRAMS[program].forward(operands)


@forward_op.register_fake
def _(operands, program):
    out, lse = _PROGRAMS[program].out, _PROGRAMS[program].lse
    return operands[0].new_empty(out.shape), operands[0].new_empty(lse.shape, dtype=lse.dtype)


@torch.library.custom_op(
    "ring_attn::backward",
    mutates_args=(),
    schema="(Tensor?[] operands, Tensor out, Tensor lse, Tensor dout, Tensor dlse, int[] wanted, int program) -> Tensor[]",
)
def backward_op(operands, out, lse, dout, dlse, wanted, program):
    return _PROGRAMS[program].backward(operands, out, lse, dout, dlse, tuple(wanted))


@backward_op.register_fake
def _(operands, out, lse, dout, dlse, wanted, program):
    return [operands[number].new_empty(operands[number].shape) for number in wanted]
