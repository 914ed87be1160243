"""Which K/V shards each rank attends to, and in which order, derived from the layout and the mask alone."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jax_core.masks.layout import Layout, Run, runs
from jax_core.masks.static import Mask, empty


class Step(NamedTuple):
    """One step of the ring: the rank's queries attend to the current K/V shard.

    ``hop_in``: how many ranks K/V moved since the previous step (0 at the diagonal step, which is the first); their gradients now
    follow by as many. ``hop_out``: how many ranks they move before the next step (0 at the last).
    """

    hop_in: int
    hop_out: int


def steps(shifts: tuple[int, ...]) -> list[Step]:
    hops = [after - before for before, after in pairwise(shifts)]
    return [Step(hop_in, hop_out) for hop_in, hop_out in zip([0, *hops], [*hops, 0], strict=True)]


def visible_shifts(mask: Mask, layout: Layout, size: int, q_length: int, k_length: int) -> tuple[int, ...]:
    """The shifts to visit, ascending from 0: at shift ``s`` rank ``r`` has the K/V of rank ``(r - s) % size``.

    A shift at which no rank has a visible pair is left out, and the rotation jumps over it (a sliding window that reaches one shard
    back needs two shifts, whatever the ring's size). ``q_length``, ``k_length``: lengths of a shard.
    """
    queries, keys = (_of_all_ranks(layout, size, length) for length in (q_length, k_length))

    def any_rank_sees(shift: int) -> bool:
        """Every run of a rank's queries beside every run of the keys that it has: ``[rank, query run, key run]``."""
        k_start = np.roll(keys.start, shift, axis=0)
        return not empty(mask, queries._replace(start=queries.start[:, :, None]), keys._replace(start=k_start[:, None])).all()

    return tuple(shift for shift in range(size) if shift == 0 or any_rank_sees(shift))


def _of_all_ranks(layout: Layout, size: int, length: int) -> Run:
    """The runs of all ranks as one, whose start is an array ``[ranks, runs of a rank]``."""
    held = runs(layout, np.arange(size), size, length)
    return held[0]._replace(start=np.stack([run.start for run in held], axis=1))
