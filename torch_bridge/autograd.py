"""Attention as a torch operator: ``torch.library`` custom ops around the compiled pair, and their ``autograd.Function``.

Torch saves plain tensors (the operands, the output, the LSE), so checkpointing and offload hooks work as for any operator.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from jax_core.masks.functions import from_mask_mod
from jax_core.request.options import Options
from jax_core.request.spec import both_sides
from jax_core.strategies.contract import Operands
from torch_bridge.announced import telling
from torch_bridge.compiled import ARRAYS, Form, Program, program
from torch_bridge.dlpack import narrow_ids, precision_scope, to_torch
from torch_bridge.mesh import Ring, resolve
from torch_bridge.runtime import start

# An operator's arguments are tensors and numbers; a program goes by its number in this list, which only grows.
_PROGRAMS: list[Program] = []
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def attend(
    where: tuple[Any, str | int | None],
    tensors: dict[str, torch.Tensor | None],
    dropout_seed: int | torch.Tensor | None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards.

    ``where``: mesh and mesh dimension, as :func:`torch_bridge.mesh.resolve` takes them. ``tensors``: by the names of
    :class:`jax_core.strategies.contract.Operands`, queries, keys and values ``[batch, seq, heads, dim]``, ids of any integer type.
    ``dropout_seed``: 64 bits, or an integer tensor of one element. ``options``: the fields of :class:`Options`.
    """
    ids = {name: narrow_ids(x, name) for name, x in tensors.items() if name.endswith("_ids") and x is not None}
    query = tensors["query"]
    assert query is not None
    named: dict[str, Any] = {**tensors, **ids, "dropout_seed": _seed_words(dropout_seed, query.device)}
    arrays: tuple[Any, ...] = both_sides(Operands(**named))[: len(ARRAYS)]
    if options["mask_mod"] is not None:
        options, arrays = _lift_mask_mod(where, options, arrays)
    if torch.compiler.is_compiling():
        arrays = _distinct(arrays)
    forms = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in arrays)
    return _Attention.apply(_number(where, options, forms, query.device), *arrays)


def _distinct(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dynamo does not trace an autograd function that is given one tensor twice; ids often serve queries and keys."""
    twice = [x is not None and any(x is other for other in arrays[:place]) for place, x in enumerate(arrays)]
    return tuple(x.view_as(x) if again else x for x, again in zip(arrays, twice, strict=True))


@torch.compiler.disable
def _lift_mask_mod(where, options: dict[str, Any], arrays: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The mask function as it is now: traced, and the arrays that it closes over as further operands."""
    device = arrays[0].device
    start(ring=resolve(*where), device=device)
    with precision_scope(arrays[0].dtype):
        predicate, consts = from_mask_mod(options["mask_mod"])
        further = [_operand(const, device) for const in consts]
    return {**options, "mask_mod": None, "predicates": (predicate,)}, (*arrays, *further)


def _operand(const: Any, device: torch.device) -> torch.Tensor:
    """An array that a mask function closes over, with a dimension at least, on ``device``. One that is there already stays."""
    if isinstance(const, jax.Array) and const.platform() != "cpu" and device.type != "cpu" and len(const.devices()) == 1:
        tensor = to_torch(const).to(device)
    else:
        tensor = torch.from_numpy(np.array(const)).to(device, non_blocking=True)
    return tensor if tensor.dim() else tensor.reshape(1)


def _seed_words(seed: int | torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """64 bits as two int32 words, low first; JAX reads them as unsigned."""
    if seed is None:
        return None
    if not isinstance(seed, torch.Tensor):
        # Filled on the device: a copy from the host would wait for all that is queued there.
        seed = torch.full((1,), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
    return seed.to(device, torch.int64).reshape(1).view(torch.int32)


@torch.compiler.assume_constant_result
def _number(where: tuple[Any, str | int | None], options: dict[str, Any], forms: tuple, device: torch.device) -> int:
    """The number of the program; under ``torch.compile`` found once, while tracing."""
    return _numbered(resolve(*where), tuple(options.items()), forms, device)


@cache
def _numbered(ring: Ring, options: tuple[tuple[str, Any], ...], forms: tuple, device: torch.device) -> int:
    signature = tuple(None if form is None else Form(*form) for form in forms)
    with telling(ring, device):
        _PROGRAMS.append(program(Options(**dict(options)), signature, ring, device))
    return len(_PROGRAMS) - 1


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number: int, *operands: torch.Tensor | None):
        run = _PROGRAMS[number].forward if _unobserved(operands) else partial(forward_op, program=number)
        out, lse = run(list(operands))
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)  # an LSE that nothing was made of has no gradient, not one of zeros
        ctx.number = number
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        *operands, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        run = _PROGRAMS[ctx.number].backward if _unobserved((*operands, dout, dlse)) else partial(backward_op, program=ctx.number)
        found = run(operands, out, lse, dout, dlse, wanted)
        gradients = dict(zip(wanted, found, strict=True))
        return None, *(gradients.get(number) for number in range(len(operands)))


def _unobserved(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch has nobody to show an operator to: no tracer, no mode, no profiler, no subclass. The way through its dispatcher
    takes longer than that of the tensors to JAX and back."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.autograd._profiler_enabled():
        return False
    return all(type(tensor) in _PLAIN for tensor in tensors)


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
    schema="(Tensor?[] operands, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, int[] wanted, int program) -> Tensor[]",
)
def backward_op(operands, out, lse, dout, dlse, wanted, program):
    return _PROGRAMS[program].backward(operands, out, lse, dout, dlse, wanted)


@backward_op.register_fake
def _(operands, out, lse, dout, dlse, wanted, program):
    return [operands[number].new_empty(operands[number].shape) for number in wanted]
