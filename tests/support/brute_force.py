"""Small random masks, tiles and layouts, for checking every pair of positions one by one."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from jax_core.masks.layout import LAYOUTS, Run
from jax_core.masks.plan import Plan
from jax_core.masks.static import Mask, make_mask, visible

brute_force = settings(deadline=None, derandomize=True, max_examples=200)

sides = st.none() | st.integers(-1, 7)
masks = st.builds(make_mask, st.booleans(), st.none() | st.integers(0, 7) | st.tuples(sides, sides), st.none() | st.integers(1, 6))
bounded_masks = st.builds(lambda mask, keys: replace(mask, keys=keys), masks, st.none() | st.integers(1, 14))
tiles = st.builds(Run, st.integers(-6, 15), st.integers(1, 4), st.integers(1, 6))
layouts, sizes = st.sampled_from(LAYOUTS), st.integers(1, 8)
halves = st.integers(1, 5)  # half a shard's length, so that zigzag can split it


def plans(size: int, length: int) -> st.SearchStrategy[Plan]:
    """Any over ``size`` ranks with shards of ``length`` positions."""
    pieces = [count for count in range(1 if size == 1 else 3, length + 1) if length % count == 0]

    def dealt(count: int, order: list[int]) -> Plan:
        return Plan(length // count, tuple(tuple(sorted(order[rank::size])) for rank in range(size)))

    return st.sampled_from(pieces).flatmap(lambda count: st.builds(dealt, st.just(count), st.permutations(range(size * count))))


def positions_of(run: Run) -> np.ndarray:
    return np.array([run.start + i * run.stride for i in range(run.length)])


def seen_by(mask: Mask, q_pos: Any, k_pos: Any) -> np.ndarray:
    return visible(mask, np.asarray(q_pos)[:, None], np.asarray(k_pos)[None])


def two_bounds_meet(mask: Mask) -> bool:
    """Whether bounds combine: together they can hide every pair of a tile that neither hides alone."""
    return (mask.chunk is not None and mask.left is not None) or mask.keys is not None
