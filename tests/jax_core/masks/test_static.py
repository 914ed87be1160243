"""Static masks, by brute force over small random tiles: every tile is judged pair by pair."""

from dataclasses import fields
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import bounded_masks, brute_force, positions_of, seen_by, tiles, two_bounds_meet
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_core.masks.layout import LAYOUTS, Run, runs
from jax_core.masks.static import Mask, check_reach, empty, full, make_mask, seen_from, shifted, visible


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ((False, None, None), Mask()),
        ((True, None, None), Mask(causal=True)),
        ((False, 3, None), Mask(left=3, right=3)),
        ((False, (3, 2), None), Mask(left=3, right=2)),
        ((False, [3, 2], None), Mask(left=3, right=2)),
        ((False, (-1, 2), None), Mask(right=2)),
        ((False, (None, None), None), Mask()),
        ((False, -1, None), Mask()),
        ((False, 0, None), Mask(left=0, right=0)),
        ((True, 3, None), Mask(causal=True, left=3)),
        ((True, (3, 0), None), Mask(causal=True, left=3)),
        ((False, None, 4), Mask(causal=True, chunk=4)),
        ((False, 2, 4), Mask(causal=True, left=2, chunk=4)),
    ],
)
def test_make_mask(arguments: tuple[Any, ...], mask: Mask):
    assert make_mask(*arguments) == mask


@pytest.mark.parametrize("window", [-2, (-2, 0), (0, -3), (1, 2, 3), (1,), "3", 1.5, (1.0, 2), True, (True, 1)])
def test_a_window_that_is_none(window: Any):
    with pytest.raises(ValueError, match=r"sliding_window .*got "):
        make_mask(window=window)


@pytest.mark.parametrize("chunk", [0, -4, 2.0, "4", True])
def test_a_chunk_that_is_none(chunk: Any):
    with pytest.raises(ValueError, match=r"chunk_size must be a positive int or None, got "):
        make_mask(chunk=chunk)


def plainly_visible(mask: Mask, q: int, k: int) -> bool:
    return not (
        (mask.causal and k > q)
        or (mask.left is not None and k < q - mask.left)
        or (mask.right is not None and k > q + mask.right)
        or (mask.chunk is not None and k // mask.chunk != q // mask.chunk)
        or (mask.keys is not None and not 0 <= k < mask.keys)
    )


@brute_force
@given(bounded_masks)
def test_visible_of_ints_and_arrays(mask: Mask):
    expected = [[plainly_visible(mask, q, k) for k in range(14)] for q in range(14)]
    assert [[bool(visible(mask, q, k)) for k in range(14)] for q in range(14)] == expected
    np.testing.assert_array_equal(seen_by(mask, range(14), range(14)), expected)


def test_visible_is_boolean_and_broadcasts_even_without_a_mask():
    seen = visible(Mask(), np.arange(3)[:, None], np.arange(2)[None])
    assert seen.dtype == bool
    assert seen.shape == (3, 2)
    assert seen.all()


@brute_force
@given(bounded_masks, tiles, tiles)
def test_tiles_are_judged_soundly(mask: Mask, q_run: Run, k_run: Run):
    """`empty` only of tiles with no visible pair, `full` only of tiles with no hidden pair."""
    seen = seen_by(mask, positions_of(q_run), positions_of(k_run))
    assert not (empty(mask, q_run, k_run) and seen.any())
    assert not (full(mask, q_run, k_run) and not seen.all())


@brute_force
@given(bounded_masks, tiles, tiles)
def test_tiles_of_stride_one_are_judged_exactly(mask: Mask, q_run: Run, k_run: Run):
    q_run, k_run = q_run._replace(stride=1), k_run._replace(stride=1)
    seen = seen_by(mask, positions_of(q_run), positions_of(k_run))
    assert full(mask, q_run, k_run) == seen.all()
    if not two_bounds_meet(mask):
        assert empty(mask, q_run, k_run) == (not seen.any())


@brute_force
@given(bounded_masks, st.integers(0, 15), st.integers(0, 9), st.booleans())
def test_the_interval_seen_from_a_position_is_what_is_visible(mask: Mask, position: int, origin: int, of_keys: bool):
    low, high = seen_from(mask, position - origin, 2 - origin, 13 - origin, origin, of_keys, min, max)
    pairs = ((position, other) if of_keys else (other, position) for other in range(2, 14))
    assert [low <= other - origin <= high for other in range(2, 14)] == [plainly_visible(mask, q, k) for q, k in pairs]


@brute_force
@given(bounded_masks, st.integers(0, 15), st.integers(0, 6), st.booleans())
def test_the_intervals_seen_from_a_span(mask: Mask, first: int, more: int, of_keys: bool):
    """Within ``low(first) .. high(last)`` lies all that is visible to some; ``low(last) .. high(first)`` is visible to all."""
    last, others = first + more, range(24)
    (some_low, all_high), (all_low, some_high) = (seen_from(mask, at, 0, 23, 0, of_keys, min, max) for at in (first, last))
    seen = seen_by(mask, range(first, last + 1), others) if of_keys else seen_by(mask, others, range(first, last + 1)).T
    np.testing.assert_array_equal(seen.all(0), [all_low <= other <= all_high for other in others])
    assert not [other for other in others if seen[:, other].any() and not some_low <= other <= some_high]


def test_every_field_of_a_mask_is_tried():
    """A field that is new must be known to the masks above, and so to `visible`, its interval and its tiles."""
    tried = {"causal", "left", "right", "chunk", "keys"} | {"any_position"}  # masks, and far_masks
    assert {field.name for field in fields(Mask)} == tried


LEAST, GREATEST = -(2**31), 2**31 - 1
anywhere = st.sampled_from([LEAST, LEAST + 1, LEAST + 6, -8, -7, -1, 0, 5, 7, GREATEST - 6, GREATEST - 1, GREATEST])
far_sides = st.none() | st.sampled_from([0, 3, 2**30, GREATEST - 1, GREATEST])
far_masks = st.builds(
    Mask, st.booleans(), far_sides, far_sides, st.none() | st.sampled_from([1, 7, 2**30, GREATEST]), any_position=st.just(True)
)


@pytest.mark.slow
@settings(brute_force, max_examples=60)  # each compiles a program
@given(far_masks, st.lists(anywhere, min_size=1), st.lists(anywhere, min_size=1))
def test_ids_anywhere_among_32_bits(mask: Mask, q_ids: list[int], k_ids: list[int]):
    """No sum, difference or quotient of positions goes wrong in 32 bits, and tiles are judged soundly."""
    expected = np.array([[plainly_visible(mask, q, k) for k in k_ids] for q in q_ids])
    q, k = np.array(q_ids, np.int32), np.array(k_ids, np.int32)
    np.testing.assert_array_equal(seen_by(mask, q_ids, k_ids), expected)  # in 64 bits
    np.testing.assert_array_equal(seen_by(mask, q, k), expected)
    np.testing.assert_array_equal(visible(mask, jnp.asarray(q)[:, None], jnp.asarray(k)[None]), expected)
    tiles = (Run(ids.min(), ids.max(keepdims=True) - ids.min(), 2) for ids in (q, k))
    q_run, k_run = (tile._replace(start=np.atleast_1d(tile.start)) for tile in tiles)
    assert not (empty(mask, q_run, k_run).any() and expected.any())
    assert not (full(mask, q_run, k_run).any() and not expected.all())


@pytest.mark.parametrize(("window", "chunk"), [(2**31, None), ((3, 2**32 - 2), None), (None, 2**31), (None, 10**12)])
def test_windows_and_chunks_that_ids_could_reach_beyond(window: Any, chunk: Any):
    with pytest.raises(ValueError, match=r"sliding_window and chunk_size must be below 2\*\*31 \(or None\), got "):
        check_reach(window, chunk)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (2**31 - 1, 5), ((-1, 2**32 - 1), None), (10**12, 2**31 - 1)])
def test_windows_and_chunks_that_ids_cannot_reach_beyond(window: Any, chunk: Any):
    check_reach(window, chunk)


@pytest.mark.parametrize(
    "mask", [make_mask(), make_mask(True), make_mask(window=(3, 2)), make_mask(True, 4), make_mask(window=1, chunk=3)], ids=str
)
def test_masks_of_numpy_and_traced_positions(mask: Mask):
    """The same answers as of ints, and booleans, from arrays of tiles and from tracers."""

    def judge(q: Any, k: Any) -> tuple[Any, Any, Any]:
        return visible(mask, q, k), empty(mask, Run(q, 1, 3), Run(k, 2, 2)), full(mask, Run(q, 1, 3), Run(k, 2, 2))

    q_start, k_start = (grid.ravel() for grid in np.meshgrid(*2 * [np.arange(0, 13, dtype=np.int32)]))
    expected = [list(map(bool, judge(int(q), int(k)))) for q, k in zip(q_start, k_start, strict=True)]
    for found in (judge(q_start, k_start), jax.jit(judge)(q_start, k_start)):
        assert [array.dtype for array in found] == [bool] * 3
        np.testing.assert_array_equal(np.transpose(found), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_shards_of_a_ring(layout: str):
    """What the ring skips and what it computes unmasked, tile by tile of 4 ranks, is right for causal attention."""
    mask, skipped = make_mask(causal=True), 0
    for rank, source in product(range(4), range(4)):
        for q_run, k_run in product(runs(layout, rank, 4, 6), runs(layout, source, 4, 6)):
            pairs = [k <= q for q, k in product(positions_of(q_run), positions_of(k_run))]
            skipped += bool(empty(mask, q_run, k_run))
            assert bool(empty(mask, q_run, k_run)) == (not any(pairs))
            assert bool(full(mask, q_run, k_run)) == all(pairs)
    assert skipped == {"contiguous": 6, "zigzag": 28, "striped": 0}[layout]


@pytest.mark.parametrize("by", [-7, 0, 5])
@pytest.mark.parametrize(
    "mask", [make_mask(causal=True), make_mask(window=(4, 2)), make_mask(True, (3, None)), make_mask(window=(None, 1))]
)
def test_a_moved_mask_is_the_mask_of_moved_queries(mask, by):
    for q in range(10, 20):
        for k in range(30):
            assert bool(visible(shifted(mask, by), q, k)) == bool(visible(mask, q + by, k)), (q, k)


def test_a_moved_side_that_no_distance_fills_is_no_bound():
    assert shifted(make_mask(window=(2**31 - 1, 0)), -4).left is None
    assert shifted(make_mask(window=(4, 2**31 - 1)), 4).right is None
