"""Which ranks may see which shards of keys, from the layout and the mask alone."""

from itertools import product
from math import prod

import numpy as np

from jax_core.masks.layout import Layout, Run, runs
from jax_core.masks.static import Mask, empty


def visible_shifts(mask: Mask, layout: Layout, sizes: tuple[int, ...], q_length: int, k_length: int) -> list[tuple[int, ...]]:
    """The shifts at which some rank may see a key, ascending, and that of a rank's own keys; all if positions are data.

    ``sizes``: of each axis that the ranks go along, the first one major. At shift ``(i, j)`` rank ``(a, b)`` has the keys of rank
    ``(a - i, b - j)``, modulo the sizes. ``q_length``, ``k_length``: lengths of a shard.
    """
    shifts = list(product(*map(range, sizes)))
    if mask.any_position:
        return shifts
    queries, keys = (_of_all_ranks(layout, prod(sizes), length) for length in (q_length, k_length))
    queries = queries._replace(start=queries.start[:, :, None])
    ranks = np.arange(prod(sizes)).reshape(sizes)

    def any_rank_sees(shift: tuple[int, ...]) -> bool:
        owners = np.roll(ranks, shift, axis=range(len(sizes))).reshape(-1)
        # Every run of a rank's queries beside every run of the keys that it has: [rank, query run, key run].
        return not empty(mask, queries, keys._replace(start=keys.start[owners][:, None])).all()

    return [shift for shift in shifts if not any(shift) or any_rank_sees(shift)]


def _of_all_ranks(layout: Layout, size: int, length: int) -> Run:
    """The runs of all ranks as one, whose start is an array ``[ranks, runs of a rank]``."""
    of_each = runs(layout, np.arange(size), size, length)
    return of_each[0]._replace(start=np.stack([run.start for run in of_each], axis=1))
