"""The custom ops under ``torch.vmap``: the mapped dimension joins the batch where the operation says that it may. Else the op is
called once for each entry, in order, so all ranks of a ring do the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.call.programs import call_of
from torch_bridge.job.ring import Tensors

Dims = Sequence[int | None]


def forward(
    op: Callable[..., list[Tensor]], size: int, in_dims: tuple[Any, ...], operands: Tensors, key: str
) -> tuple[list[Tensor], list[int]]:
    dims = in_dims[0]
    batched = _batched(operands, dims, (), key)
    if batched is None:
        results = _stacked([op(_entry(operands, dims, number), key) for number in range(size)])
    else:
        batch = _shape(operands[0], dims[0])[0]
        results = [x.unflatten(0, (size, batch)) for x in op(_folded(operands, dims, size, _first(key), batched), key)]
    return results, [0] * len(results)


def backward(
    op: Callable[..., list[Tensor]],
    size: int,
    in_dims: tuple[Any, ...],
    operands: Tensors,
    results: Tensors,
    cotangents: Tensors,
    wanted: Sequence[int],
    key: str,
) -> tuple[list[Tensor], list[int]]:
    """Gives a gradient for each entry, also of an operand that is not mapped."""
    groups = list(zip((operands, results, cotangents), in_dims[:3], strict=True))
    dims, places = in_dims[0], [0] * len(wanted)
    batched = _batched(operands, dims, wanted, key)
    if batched is None:
        entries = ([_entry(tensors, mapped, number) for tensors, mapped in groups] for number in range(size))
        return _stacked([op(*entry, wanted, key) for entry in entries]), places
    batch = _shape(results[0], in_dims[1][0])[0]
    joined = [[_joined(x, dim, size, batch) for x, dim in zip(*group, strict=True)] for group in groups[1:]]
    gradients = op(_folded(operands, dims, size, (*_first(key), *wanted), batched), *joined, wanted, key)
    shapes = [_shape(operands[number], dims[number]) for number in wanted]
    return [_of_entries(gradient, size, batch, shape) for gradient, shape in zip(gradients, shapes, strict=True)], places


def _batched(operands: Tensors, dims: Dims, wanted: Sequence[int], key: str) -> Mapping[int, int] | None:
    return call_of(key).operation.batched(operands, [dim is not None for dim in dims], wanted)


def _first(key: str) -> Sequence[int]:
    return call_of(key).operation.differentiated


def _stacked(entries: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(tensors) for tensors in zip(*entries, strict=True)]


def _entry(tensors: Tensors, dims: Dims, number: int) -> list[Tensor | None]:
    return [x if x is None or dim is None else x.select(dim, number) for x, dim in zip(tensors, dims, strict=True)]


def _shape(tensor: Tensor | None, dim: int | None) -> tuple[int, ...]:
    """The shape of one entry."""
    assert tensor is not None
    return tuple(size for place, size in enumerate(tensor.shape) if place != dim)


def _folded(operands: Tensors, dims: Dims, size: int, own: Sequence[int], batched: Mapping[int, int]) -> list[Tensor | None]:
    """The operands of all entries as one batch. One that has no batch and is the same for all stays as it is, unless it is among
    ``own``, of which each entry has its own: it has a gradient."""
    batch = _shape(operands[0], dims[0])[0]
    folded = list(operands)
    for place, rank in batched.items():
        x, dim = operands[place], dims[place]
        same = x is None or (dim is None and (x.dim() < rank or x.shape[0] == 1))
        if not same or (x is not None and place in own):
            folded[place] = _joined(x, dim, size, batch, rank)
    return folded


def _joined(x: Tensor | None, dim: int | None, size: int, batch: int, rank: int | None = None) -> Tensor | None:
    """All entries of ``x`` as one batch of ``size * batch``. ``rank``: the dimensions that an entry with a batch has."""
    if x is None:
        return None
    each = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    missing = 0 if rank is None else rank + 1 - each.dim()
    each = each.reshape(size, *(1,) * missing, *each.shape[1:])
    return each.expand(size, batch, *each.shape[2:]).reshape(size * batch, *each.shape[2:])


def _of_entries(gradient: Tensor, size: int, batch: int, shape: tuple[int, ...]) -> Tensor:
    """The gradient of each entry, summed over the batch where the entry has none."""
    each = gradient.reshape(size, batch, *gradient.shape[1:])
    summed = batch != 1 and (len(shape) < gradient.dim() or shape[0] == 1)
    return (each.sum(1) if summed else each).reshape(size, *shape)
