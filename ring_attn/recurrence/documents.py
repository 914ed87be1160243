"""Which document each token of a rank's pieces is of, as operators of torch's take it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_bridge.backends.dlpack import narrow_ids
from torch_bridge.tracing import untraced


class Documents(NamedTuple):
    """Of this rank's pieces ``[pieces, tokens]``, for each entry of the batch: which tokens are ``real``; the ``number`` of each
    one's sequence, over all pieces, and where sequences begin, as ``cu_seqlens``; for each piece its ``first`` and ``last``
    sequence, and the ids of its first and last real token, ``ends [pieces, 2]``."""

    real: Tensor
    number: Tensor
    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    ends: Tensor

    def of_first(self, states: Tensor) -> Tensor:
        """States ``[pieces, ...]`` as those of the sequences: of a piece's first one, and 0 for others."""
        return self._spread(states, self.first)

    def of_last(self, states: Tensor) -> Tensor:
        return self._spread(states, self.last)

    def _spread(self, states: Tensor, at: Tensor) -> Tensor:
        return states.new_zeros(len(self.cu_seqlens) - 1, *states.shape[1:]).index_copy(0, at, states)


_FIXED = WeakTensorKeyDictionary()  # documents by batch and pieces, of ids that nobody changes


def fix(ids: Tensor) -> None:
    """Nobody changes these ids: their documents, for which the host waits for the device, are found once for all layers."""
    _FIXED[ids] = {}


@untraced
def documents_of(ids: Tensor, batch: int, pieces: int) -> Documents:
    found = _FIXED.get(ids, {})
    if (batch, pieces) not in found:
        found[batch, pieces] = _documents(cut(narrow_ids(ids, "segment_ids").expand(batch, -1), pieces))
    documents: Documents = found[batch, pieces]
    return documents


def _documents(ids: Tensor) -> Documents:
    """As ``jax_core.recurrence.documents``: a document is a stretch of equal ids, whatever padding is in between."""
    real = ids >= 0
    place = torch.where(real, torch.arange(ids.shape[1], device=ids.device), -1)
    so_far = place.cummax(1).values
    latest = torch.where(so_far >= 0, ids.gather(1, so_far.clamp_min(0)), -1)
    before = F.pad(latest[:, :-1], (1, 0), value=-1)
    begins = real & (before >= 0) & (ids != before)
    begins[:, 0] = True
    number = begins.flatten().cumsum(0).view_as(ids) - 1
    starts = begins.flatten().nonzero()[:, 0]
    cu_seqlens = F.pad(starts, (0, 1), value=ids.numel())
    first_real = torch.where(real.any(1), ids.gather(1, real.int().argmax(1, keepdim=True))[:, 0], -1)
    first, last = (number[:, at].contiguous() for at in (0, -1))  # kernels read them
    return Documents(real, number, cu_seqlens, first, last, torch.stack([first_real, latest[:, -1]], 1))


def cut(x: Tensor, count: int) -> Tensor:
    """``[batch, shard, ...]`` as ``[batch * count, piece, ...]``."""
    return x.unflatten(1, (count, x.shape[1] // count)).flatten(0, 1)
