"""The custom ops under ``torch.vmap``: the mapped dimension joins the batch where every operand has a batch to join, and nothing
depends on the place in it. Else the op is called once for each entry, in order, so all ranks of a ring do the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.attention.request import ARRAYS, QKV
from torch_bridge.call.programs import call_of

_SINKS, _SEED, _ORIGIN = (ARRAYS.index(name) for name in ("softmax_aux", "dropout_seed", "origin"))
_BATCHED = {"query": 4, "key": 4, "value": 4, "bias": 4, "mask": 4, "alibi_slopes": 2} | dict.fromkeys(
    (name for name in ARRAYS if name.endswith("_ids")), 2
)  # the dimensions of an operand that has a batch, which is its first
Dims = Sequence[int | None]
Optional = Sequence[Tensor | None]


def forward(
    op: Callable[..., Any], size: int, in_dims: tuple[Any, ...], operands: Optional, call: str
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    dims = in_dims[0]
    if _depends_on_the_place(operands, call) or dims[_SINKS] is not None:
        each = [op(_entry(operands, dims, number), call) for number in range(size)]
        return (torch.stack([out for out, _ in each]), torch.stack([lse for _, lse in each])), (0, 0)
    batch = _shape(operands[0], dims[0])[0]
    out, lse = op(_folded(operands, dims, size, ()), call)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def backward(
    op: Callable[..., Any],
    size: int,
    in_dims: tuple[Any, ...],
    operands: Optional,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Sequence[int],
    call: str,
) -> tuple[list[Tensor], list[int]]:
    """Gives a gradient for each entry, also of an operand that is not mapped."""
    dims, results = in_dims[0], (out, lse, dout, dlse)
    if _depends_on_the_place(operands, call) or dims[_SINKS] is not None or _SINKS in wanted:
        each = [op(_entry(operands, dims, number), *_entry(results, in_dims[1:5], number), wanted, call) for number in range(size)]
        return [torch.stack(gradients) for gradients in zip(*each, strict=True)], [0] * len(wanted)
    batch = _shape(out, in_dims[1])[0]
    joined = [None if x is None else _joined(x, dim, size, batch) for x, dim in zip(results, in_dims[1:5], strict=True)]
    gradients = op(_folded(operands, dims, size, wanted), *joined, wanted, call)
    return [
        _of_entries(gradient, size, batch, _shape(operands[number], dims[number]))
        for number, gradient in zip(wanted, gradients, strict=True)
    ], [0] * len(wanted)


def _depends_on_the_place(operands: Optional, call: str) -> bool:
    """Whether dropout or a mask function may look at the index in the batch."""
    options = call_of(call).options
    return bool(options.dropout_prob or options.predicates or options.mask_builder) or operands[_ORIGIN] is not None


def _entry(tensors: Optional, dims: Dims, number: int) -> list[Tensor | None]:
    return [x if x is None or dim is None else x.select(dim, number) for x, dim in zip(tensors, dims, strict=True)]


def _shape(tensor: Tensor | None, dim: int | None) -> tuple[int, ...]:
    """The shape of one entry."""
    assert tensor is not None
    return tuple(size for place, size in enumerate(tensor.shape) if place != dim)


def _folded(operands: Optional, dims: Dims, size: int, wanted: Sequence[int]) -> list[Tensor | None]:
    """The operands of all entries as one batch. One that has no batch and is the same for all stays as it is, unless its gradient
    is ``wanted``, which each entry has its own of."""
    batch = _shape(operands[0], dims[0])[0]
    folded = list(operands)
    for place, (name, x, dim) in enumerate(zip(ARRAYS, operands, dims, strict=True)):
        rank = _BATCHED.get(name)
        if x is None or rank is None:
            continue
        same = dim is None and (x.dim() < rank or x.shape[0] == 1)
        if not same or place in (*QKV, *wanted):
            folded[place] = _joined(x, dim, size, batch, rank)
    return folded


def _joined(x: Tensor, dim: int | None, size: int, batch: int, rank: int | None = None) -> Tensor:
    """All entries of ``x`` as one batch of ``size * batch``. ``rank``: the dimensions that an entry with a batch has."""
    each = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    missing = 0 if rank is None else rank + 1 - each.dim()
    each = each.reshape(size, *(1,) * missing, *each.shape[1:])
    return each.expand(size, batch, *each.shape[2:]).reshape(size * batch, *each.shape[2:])


def _of_entries(gradient: Tensor, size: int, batch: int, shape: tuple[int, ...]) -> Tensor:
    """The gradient of each entry, summed over the batch where the entry has none."""
    each = gradient.reshape(size, batch, *gradient.shape[1:])
    summed = batch != 1 and (len(shape) < gradient.dim() or shape[0] == 1)
    return (each.sum(1) if summed else each).reshape(size, *shape)
