"""What every backend knows about the ring that shares a sequence and about the tensors of a call."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor | None]


class AnyRing(Protocol):
    """The ranks that share a sequence. Hashable; equal rings are interchangeable."""

    def __hash__(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks_here(self) -> Sequence[int]:
        """The ring ranks whose shards this process's tensors hold."""

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The torch ProcessGroup of the ranks; None if this process holds the shards of all of them."""

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """``tensor``, the shards in ``ranks_here``, with its dimension ``dim`` split over the devices that hold them."""


def tensors_per_sequence(ring: AnyRing) -> int:
    """How many tensors like this process's make up the whole sequence."""
    return ring.size // len(ring.ranks_here)
