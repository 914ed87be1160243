"""Which shards of K/V each rank meets, and when: the ring's timetable, from layout and mask alone."""

from itertools import product

from jax_core.masks.layout import runs
from jax_core.masks.static import Mask, empty


def shifts(mask: Mask, layout: str, size: int, q_length: int, k_length: int) -> tuple[int, ...]:
    """The distances that K/V travel, ascending from 0: at shift ``s`` rank ``r`` holds the K/V of rank ``(r - s) % size``.

    A shift at which no rank has a visible pair is left out (a sliding window that reaches one shard back needs two shifts,
    whatever the ring's size), and the rotation jumps over it. ``q_length``, ``k_length``: lengths of a shard.
    """
    return tuple(shift for shift in range(size) if shift == 0 or _anyone_sees(mask, layout, size, q_length, k_length, shift))


def _anyone_sees(mask: Mask, layout: str, size: int, q_length: int, k_length: int, shift: int) -> bool:
    return any(
        not empty(mask, q_run, k_run)
        for rank in range(size)
        for q_run, k_run in product(runs(layout, rank, size, q_length), runs(layout, (rank - shift) % size, size, k_length))
    )
