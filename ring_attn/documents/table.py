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
    """``table [rows, places + 1]``, or of documents that are placed ``[ranks, pieces, 3]`` (``jax_core.masks.placement``), over the
    ``ring`` of these global ranks; ``padding``: whether a token is in no document; ``shared_eighths`` as in ``options``."""

    table: Tensor
    padding: bool
    ring: tuple[int, ...] = ()
    shared_eighths: int = operands.EIGHTHS

    @property
    def placed(self) -> bool:
        return self.table.ndim == 3


_DEVICES = ("cpu", "cuda")  # whose programs take them


def of_cumulative(cu_seqlens: Tensor) -> Tensor | None:
    """Of ``cu_seqlens [documents + 1]``, as one row; None where there are too many."""
    count = cu_seqlens.shape[0] - 1
    width = places(count)
    if width > operands.MOST_DOCUMENTS or cu_seqlens.device.type not in _DEVICES:
        return None
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(width - count)]).to(torch.int32)[None]


def of_numbers(numbers: Tensor) -> Documents | None:
    """Of the documents' numbers ``[rows, seq]`` of whole sequences, negative on padding. None where a document is no interval,
    where padding is between tokens, and where there are too many."""
    if not operands.MOST_DOCUMENTS or not numbers.numel() or numbers.device.type not in _DEVICES:
        return None
    before, real = F.pad(numbers[:, :-1], (1, 0), value=-1), numbers >= 0
    begins = real & (numbers != before)
    blocks, falls, holes = (real & (before < 0)).sum(1).max(), (real & (numbers < before)).any(), (~real).any()
    most_blocks, any_falls, padding, count = torch.stack([blocks, falls.long(), holes.long(), begins.sum(1).max()]).tolist()
    width = places(count)
    if most_blocks > 1 or any_falls or width > operands.MOST_DOCUMENTS:
        return None
    index = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device).expand(numbers.shape)
    end = torch.where(real, index + 1, 0).amax(1, keepdim=True)
    table = end.repeat(1, width + 2)  # the last column takes what is written for tokens that begin nothing
    table.scatter_(1, torch.where(begins, begins.cumsum(1) - 1, width + 1), index.contiguous())
    return Documents(table[:, :-1].contiguous(), bool(padding))


def places(count: int) -> int:
    """How many a table has for so many."""
    return max(_LEAST, 1 << max(count - 1, 0).bit_length())
