"""The custom ops under ``torch.vmap``: called once for each entry, in order, so all ranks of a ring do the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo

from torch_bridge.mesh.protocol import Tensors

Mapped = Sequence[int | None] | None  # for a list of tensors the mapped dimension of each; None for any other argument


def of_each_entry(
    op: Callable[..., list[Tensor]], info: VmapInfo, in_dims: Sequence[Mapped], *arguments: Any
) -> tuple[list[Tensor], list[int]]:
    """The results of all entries, stacked: gradients are each entry's own, also of an operand that is not mapped."""
    entries = [
        [x if dims is None else _entry(x, dims, number) for x, dims in zip(arguments, in_dims, strict=True)]
        for number in range(info.batch_size)
    ]
    results = [torch.stack(tensors) for tensors in zip(*(op(*entry) for entry in entries), strict=True)]
    return results, [0] * len(results)


def _entry(tensors: Tensors, dims: Sequence[int | None], number: int) -> list[Tensor | None]:
    return [x if x is None or dim is None else x.select(dim, number) for x, dim in zip(tensors, dims, strict=True)]
