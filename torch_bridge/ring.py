"""What every road knows of the ring that shares a sequence, and of the tensors that come."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor | None]


class Ring(Protocol):
    """Who shares a sequence. Hashable: equal rings are one."""

    def __hash__(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def held(self) -> Sequence[int]:
        """The ring ranks whose shards this process's tensors hold."""

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The torch ProcessGroup of the ranks; None where this process holds the shards of all."""

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """``tensor``, the shards in ``held``, with its dimension ``dim`` laid over the devices that hold them."""


def tensors_per_sequence(ring: Ring) -> int:
    """How many tensors such as this process's make the whole sequence."""
    return ring.size // len(ring.held)
