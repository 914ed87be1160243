"""A run of a program to see what it does: which rings its calls go over; or with each process of a ring by itself, whatever mesh
the program names, as if it were the only one. ``ring_attn.verify`` compares the two."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist

Ranks = tuple[int, ...]


@dataclass(eq=False)
class Trial:
    """``alone``: the global ranks of a ring that is taken for a ring of this process, of global rank ``rank``, whose group is
    ``group``; empty for none. ``rings``, ``dtypes``: what calls went over, and what attention computed in."""

    alone: Ranks = ()
    rank: int | None = None
    group: "dist.ProcessGroup | None" = None
    rings: set[Ranks] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)


# Of the process and not of a thread: a checkpoint's function runs again on autograd's threads.
_current: list[Trial] = []


def current() -> Trial | None:
    """The trial under way."""
    return _current[-1] if _current else None


@contextmanager
def trying(trial: Trial) -> Iterator[Trial]:
    _current.append(trial)
    try:
        with _as_the_world(trial):
            yield trial
    finally:
        _current.remove(trial)


@contextmanager
def _as_the_world(trial: Trial) -> Iterator[None]:
    """Where the ring is the whole job, each of its processes is a job of its own: torch's default group is that of this process,
    and the launcher's variables say so. Where it is not, other processes are needed, by their ranks."""
    if trial.group is None or len(trial.alone) != dist.get_world_size():
        yield
        return
    world, become = dist.group.WORLD, dist.distributed_c10d._update_default_pg
    become(trial.group)
    try:
        with patch.dict(os.environ, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}):
            yield
    finally:
        become(world)


def note_ring(ranks: Ranks) -> None:
    """That a ring call goes over these global ranks."""
    if _current:
        _current[-1].rings.add(ranks)


def note_dtype(dtype: torch.dtype) -> None:
    """That attention computes in ``dtype``."""
    if _current:
        _current[-1].dtypes.add(dtype)
