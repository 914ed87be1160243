"""Static masks, by brute force over small random tiles: every tile is judged pair by pair."""

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from brute_force import brute_force, masks, positions_of, seen_by, tiles, two_bounds_meet
from hypothesis import given

from jax_core.masks.layout import LAYOUTS, Run, runs
from jax_core.masks.static import Mask, empty, full, make_mask, visible


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
    )


@brute_force
@given(masks)
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
@given(masks, tiles, tiles)
def test_tiles_are_judged_soundly(mask: Mask, q_run: Run, k_run: Run):
    """`empty` only of tiles with no visible pair, `full` only of tiles with no hidden pair."""
    seen = seen_by(mask, positions_of(q_run), positions_of(k_run))
    assert not (empty(mask, q_run, k_run) and seen.any())
    assert not (full(mask, q_run, k_run) and not seen.all())


@brute_force
@given(masks, tiles, tiles)
def test_tiles_of_stride_one_are_judged_exactly(mask: Mask, q_run: Run, k_run: Run):
    q_run, k_run = q_run._replace(stride=1), k_run._replace(stride=1)
    seen = seen_by(mask, positions_of(q_run), positions_of(k_run))
    assert full(mask, q_run, k_run) == seen.all()
    if not two_bounds_meet(mask):
        assert empty(mask, q_run, k_run) == (not seen.any())


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
