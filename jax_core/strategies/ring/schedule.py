"""Which K/V shards each rank attends to, and in which order, derived from the layout and the mask alone."""

from itertools import pairwise, product
from typing import NamedTuple

from jax_core.masks.layout import runs
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


def visible_shifts(mask: Mask, layout: str, size: int, q_length: int, k_length: int) -> tuple[int, ...]:
    """The shifts to visit, ascending from 0: at shift ``s`` rank ``r`` has the K/V of rank ``(r - s) % size``.

    A shift at which no rank has a visible pair is left out, and the rotation jumps over it (a sliding window that reaches one shard
    back needs two shifts, whatever the ring's size). ``q_length``, ``k_length``: lengths of a shard.
    """
    return tuple(shift for shift in range(size) if shift == 0 or _any_rank_sees(mask, layout, size, q_length, k_length, shift))


def _any_rank_sees(mask: Mask, layout: str, size: int, q_length: int, k_length: int, shift: int) -> bool:
    return any(
        not empty(mask, q_run, k_run)
        for rank in range(size)
        for q_run, k_run in product(runs(layout, rank, size, q_length), runs(layout, (rank - shift) % size, size, k_length))
    )
