"""Which ranks may see which shards of keys, from the layout and the mask alone."""

import numpy as np

from jax_core.masks.layout import Layout, Run, runs
from jax_core.masks.static import Mask, empty


class Visibility:
    """Of the queries of all ranks. ``q_length``, ``k_length``: lengths of a shard."""

    def __init__(self, mask: Mask, layout: Layout, size: int, q_length: int, k_length: int) -> None:
        self._mask = mask
        self._queries, self._keys = (_of_all_ranks(layout, size, length) for length in (q_length, k_length))

    def any_rank(self, owners: np.ndarray) -> bool:
        """Whether a query of some rank may see a key of the rank that ``owners`` (``[ranks]``) has in its place."""
        # Every run of a rank's queries beside every run of the keys that it has: [rank, query run, key run].
        queries = self._queries._replace(start=self._queries.start[:, :, None])
        return not empty(self._mask, queries, self._keys._replace(start=self._keys.start[owners][:, None])).all()


def _of_all_ranks(layout: Layout, size: int, length: int) -> Run:
    """The runs of all ranks as one, whose start is an array ``[ranks, runs of a rank]``."""
    held = runs(layout, np.arange(size), size, length)
    return held[0]._replace(start=np.stack([run.start for run in held], axis=1))
