"""Which shards of K/V the ring's ranks meet: every pair of positions is looked at."""

from itertools import product

from brute_force import brute_force, halves, layouts, masks, plans, seen_by, two_bounds_meet
from hypothesis import example, given
from hypothesis import strategies as st

from jax_core.masks.layout import shard_indices
from jax_core.masks.static import Mask, make_mask
from jax_core.strategies.visibility import visible_shifts


def shifts(mask: Mask, layout, size: int, q_length: int, k_length: int) -> tuple[int, ...]:
    """Of a ring of one axis."""
    return tuple(shift for (shift,) in visible_shifts(mask, layout, (size,), q_length, k_length))


@brute_force
@given(masks, layouts, st.integers(1, 6), halves, halves)
@example(make_mask(True, 3), "striped", 4, 1, 3)
def test_the_schedule_has_every_meeting_that_sees_anything(mask: Mask, layout: str, size: int, q_half: int, k_half: int):
    """With as many, more and fewer keys than queries; and nothing else but shift 0, where the shards' strides are 1."""
    chosen = shifts(mask, layout, size, 2 * q_half, 2 * k_half)
    q_shards, k_shards = ([shard_indices(layout, rank, size, 2 * half * size) for rank in range(size)] for half in (q_half, k_half))
    needed = {
        (rank - source) % size
        for rank, source in product(range(size), range(size))
        if seen_by(mask, q_shards[rank], k_shards[source]).any()
    } | {0}
    assert list(chosen) == sorted(set(chosen))
    assert needed <= set(chosen) <= set(range(size))
    if layout != "striped" and not two_bounds_meet(mask):
        assert set(chosen) == needed


@brute_force
@given(masks, st.integers(1, 5), st.integers(2, 5), st.data())
def test_the_schedule_of_a_plan(mask: Mask, size: int, half: int, data: st.DataObject):
    plan = data.draw(plans(size, 2 * half))
    shards = [shard_indices(plan, rank, size, plan.length) for rank in range(size)]
    meetings = product(range(size), range(size))
    needed = {(rank - source) % size for rank, source in meetings if seen_by(mask, shards[rank], shards[source]).any()} | {0}
    chosen = set(shifts(mask, plan, size, 2 * half, 2 * half))
    assert needed <= chosen if two_bounds_meet(mask) else needed == chosen


def test_a_window_on_contiguous_shards_needs_only_neighbours():
    assert shifts(make_mask(causal=True, window=4), "contiguous", 8, 4, 4) == (0, 1)
    assert shifts(make_mask(causal=True, window=5), "contiguous", 8, 4, 4) == (0, 1, 2)
    assert shifts(make_mask(window=1), "contiguous", 8, 4, 4) == (0, 1, 7)
    assert shifts(make_mask(chunk=4), "contiguous", 8, 4, 4) == (0,)
    assert shifts(make_mask(), "contiguous", 4, 4, 4) == (0, 1, 2, 3)
