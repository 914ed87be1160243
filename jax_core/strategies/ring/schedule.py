"""Which K/V shards each rank attends to, and in which order, derived from the layout and the mask alone."""

import numpy as np

from jax_core.masks.layout import Layout
from jax_core.masks.static import Mask
from jax_core.strategies.sight import Sight


def visible_shifts(mask: Mask, layout: Layout, size: int, q_length: int, k_length: int) -> tuple[int, ...]:
    """The shifts to visit, ascending from 0: at shift ``s`` rank ``r`` has the K/V of rank ``(r - s) % size``.

    A shift at which no rank has a visible pair is left out, and the rotation jumps over it (a sliding window that reaches one shard
    back needs two shifts, whatever the ring's size), unless positions are data. ``q_length``, ``k_length``: lengths of a shard.
    """
    if mask.any_position:
        return tuple(range(size))
    sees = Sight(mask, layout, size, q_length, k_length)
    return tuple(shift for shift in range(size) if shift == 0 or sees.any_rank((np.arange(size) - shift) % size))
