"""Documents as kernels take them (``jax_core.operands``): int32 ``[rows, places + 1]``, where each begins in the whole sequence and
where the last one ends. The number of places grows by doubling, for each is a program of its own.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jax_core import operands

_LEAST = 16


class Documents(NamedTuple):
    """``table [rows, places + 1]``; ``padding``: whether a token is in no document."""

    table: Tensor
    padding: bool


_DEVICES = ("cpu", "cuda")  # whose programs take them


def of_cumulative(cu_seqlens: Tensor) -> Tensor | None:
    """Of ``cu_seqlens [documents + 1]``, as one row; None where there are too many."""
    count = cu_seqlens.shape[0] - 1
    places = _places(count)
    if places > operands.MOST_DOCUMENTS or cu_seqlens.device.type not in _DEVICES:
        return None
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(places - count)]).to(torch.int32)[None]


def of_numbers(numbers: Tensor) -> Documents | None:
    """Of the documents' numbers ``[rows, seq]`` of whole sequences, negative on padding. None where a document is no interval,
    where padding is between tokens, and where there are too many."""
    if not operands.MOST_DOCUMENTS or not numbers.numel() or numbers.device.type not in _DEVICES:
        return None
    before, real = F.pad(numbers[:, :-1], (1, 0), value=-1), numbers >= 0
    begins = real & (numbers != before)
    blocks, falls, holes = (real & (before < 0)).sum(1).max(), (real & (numbers < before)).any(), (~real).any()
    most_blocks, any_falls, padding, count = torch.stack([blocks, falls.long(), holes.long(), begins.sum(1).max()]).tolist()
    places = _places(count)
    if most_blocks > 1 or any_falls or places > operands.MOST_DOCUMENTS:
        return None
    index = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device).expand(numbers.shape)
    end = torch.where(real, index + 1, 0).amax(1, keepdim=True)
    table = end.repeat(1, places + 2)  # the last column takes what is written for tokens that begin nothing
    table.scatter_(1, torch.where(begins, begins.cumsum(1) - 1, places + 1), index.contiguous())
    return Documents(table[:, :-1].contiguous(), bool(padding))


def _places(count: int) -> int:
    return max(_LEAST, 1 << max(count - 1, 0).bit_length())
