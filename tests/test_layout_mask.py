"""Layouts, static masks and the schedule, by brute force over small sequences: every tile of every mask is judged pair by pair."""

from itertools import chain, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.layout import (
    LAYOUTS,
    Run,
    check_layout,
    check_shard_length,
    inverse_permutation,
    padded_length,
    permutation,
    runs,
    shard_indices,
    shard_multiple,
)
from jax_core.mask import Mask, empty, full, make_mask, visible
from jax_core.schedule import shifts

SIZES = [(layout, size, 2 * half * size) for layout, size, half in product(LAYOUTS, (1, 2, 3, 4, 8), (1, 2, 5))]
MASKS = [
    make_mask(causal, window, chunk)
    for causal, window, chunk in product(
        (False, True), (None, 0, 1, 4, (2, 0), (0, 3), (None, 2), (3, None), (-1, 1)), (None, 1, 3, 4)
    )
]
RUNS = [Run(start, stride, length) for start, stride, length in product((0, 1, 4, 7, 12), (1, 3), (1, 2, 5))]


def positions_of(run: Run) -> np.ndarray:
    return np.array([run.start + i * run.stride for i in range(run.length)])


# --------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        ("contiguous", ["0 1 2 3", "4 5 6 7", "8 9 10 11"]),
        ("zigzag", ["0 1 10 11", "2 3 8 9", "4 5 6 7"]),
        ("striped", ["0 3 6 9", "1 4 7 10", "2 5 8 11"]),
    ],
)
def test_shards_by_hand(layout: str, shards: list[str]):
    expected = [[int(position) for position in shard.split()] for shard in shards]
    assert [shard_indices(layout, rank, 3, 12) for rank in range(3)] == expected
    assert permutation(layout, 3, 12) == list(chain(*expected))


@pytest.mark.parametrize(("layout", "size", "length"), SIZES)
def test_every_position_lies_on_one_rank(layout: str, size: int, length: int):
    order = permutation(layout, size, length)
    assert sorted(order) == list(range(length))
    assert np.array_equal(np.arange(length)[order][inverse_permutation(layout, size, length)], np.arange(length))
    per_rank = length // size
    assert [order[rank * per_rank :][:per_rank] for rank in range(size)] == [
        shard_indices(layout, rank, size, length) for rank in range(size)
    ]


@pytest.mark.parametrize(("layout", "size", "length"), SIZES)
def test_runs_are_the_shard(layout: str, size: int, length: int):
    """One or two runs, in shard order, also when the rank is a NumPy number or traced."""
    for rank in range(size):
        held = runs(layout, rank, size, length // size)
        assert 1 <= len(held) <= 2
        assert list(chain(*map(positions_of, held))) == shard_indices(layout, rank, size, length)
        assert [tuple(run) for run in runs(layout, np.int32(rank), size, length // size)] == [tuple(run) for run in held]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_a_traced_rank(layout: str):
    starts = jax.jit(lambda rank: [jnp.asarray(run.start) for run in runs(layout, rank, 4, 6)])
    for rank in range(4):
        assert [int(start) for start in starts(rank)] == [run.start for run in runs(layout, rank, 4, 6)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_of_one_keeps_the_order(layout: str):
    assert permutation(layout, 1, 6) == list(range(6))


def test_zigzag_gives_each_rank_the_same_causal_work():
    q_pos, k_pos = (np.array(permutation("zigzag", 4, 48)).reshape(4, 12) for _ in range(2))
    work = [[np.sum(k_pos[source] <= q_pos[rank][:, None]) for source in range(4)] for rank in range(4)]
    assert len({sum(row) for row in work}) == 1
    per_step = [[work[rank][(rank - step) % 4] for rank in range(4)] for step in range(1, 4)]
    assert all(len(set(step)) == 1 for step in per_step)


def test_padded_length():
    for layout, size, length in product(LAYOUTS, (1, 2, 3, 4), range(30)):
        padded = padded_length(layout, size, length)
        multiple = size * (2 if layout == "zigzag" else 1)
        assert padded % multiple == 0
        assert 0 <= padded - length < multiple
        assert len(permutation(layout, size, padded)) == padded


def test_what_layouts_refuse():
    with pytest.raises(ValueError, match=r"layout must be one of contiguous, zigzag, striped; got 'spiral'"):
        check_layout("spiral")
    for refuse in (shard_multiple, lambda layout: runs(layout, 0, 2, 4), lambda layout: permutation(layout, 2, 8)):
        with pytest.raises(ValueError, match="'spiral'"):
            refuse("spiral")
    with pytest.raises(ValueError, match=r"zigzag needs a query shard length divisible by 2, got 7; pad"):
        check_shard_length("zigzag", 7, "query shard")
    with pytest.raises(ValueError, match="divisible by 2, got 7"):
        runs("zigzag", 0, 2, 7)
    with pytest.raises(ValueError, match=r"zigzag over 2 ranks .* divisible by 4, got 14; pad it to 16"):
        permutation("zigzag", 2, 14)
    with pytest.raises(ValueError, match=r"striped over 4 ranks .* divisible by 4, got 10; pad it to 12"):
        inverse_permutation("striped", 4, 10)
    with pytest.raises(ValueError, match=r"divisible by 3, got 10; pad it to 12"):
        shard_indices("contiguous", 0, 3, 10)


# ----------------------------------------------------------------------------------------------------------------- mask


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
    assert make_mask(*arguments).is_trivial == (mask == Mask())


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


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_of_ints_arrays_and_traced_values(mask: Mask):
    expected = np.array([[plainly_visible(mask, q, k) for k in range(14)] for q in range(14)])
    assert [[bool(visible(mask, q, k)) for k in range(14)] for q in range(14)] == expected.tolist()
    q_pos, k_pos = np.arange(14)[:, None], np.arange(14)[None]
    np.testing.assert_array_equal(visible(mask, q_pos, k_pos), expected)
    traced = jax.jit(lambda q, k: visible(mask, q, k))(q_pos, k_pos)
    assert traced.dtype == bool
    np.testing.assert_array_equal(traced, expected)


def test_visible_is_boolean_and_broadcasts_even_without_a_mask():
    seen = visible(Mask(), np.arange(3)[:, None], np.arange(2)[None])
    assert seen.dtype == bool
    assert seen.shape == (3, 2)
    assert seen.all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_are_judged_soundly(mask: Mask):
    """`empty` only of tiles with no visible pair, `full` only of tiles with no hidden pair; exactly so where the strides are 1."""
    for q_run, k_run in product(RUNS, RUNS):
        seen = visible(mask, positions_of(q_run)[:, None], positions_of(k_run)[None])
        assert not (empty(mask, q_run, k_run) and seen.any())
        assert not (full(mask, q_run, k_run) and not seen.all())
        if q_run.stride == k_run.stride == 1:
            assert bool(full(mask, q_run, k_run)) == bool(seen.all())
            if not _two_bounds_meet(mask):
                assert bool(empty(mask, q_run, k_run)) == (not seen.any())


def _two_bounds_meet(mask: Mask) -> bool:
    """A chunk and a window together can hide every pair of a tile that neither hides alone."""
    return mask.chunk is not None and mask.left is not None


@pytest.mark.parametrize("mask", MASKS[::9], ids=str)
def test_tiles_of_numpy_and_traced_runs(mask: Mask):
    starts = np.arange(0, 13, 3, dtype=np.int32)
    q_start, k_start = (grid.ravel() for grid in np.meshgrid(starts, starts))
    for judge in (empty, full):
        expected = [bool(judge(mask, Run(int(q), 1, 3), Run(int(k), 2, 2))) for q, k in zip(q_start, k_start, strict=True)]
        np.testing.assert_array_equal(judge(mask, Run(q_start, 1, 3), Run(k_start, 2, 2)), expected)
        traced = jax.jit(lambda q, k, judge=judge: judge(mask, Run(q, 1, 3), Run(k, 2, 2)))(q_start, k_start)
        assert traced.dtype == bool
        np.testing.assert_array_equal(traced, expected)


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


# ------------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(4, 4), (2, 6), (6, 2)])
def test_no_meeting_that_sees_anything_is_left_out(layout: str, lengths: tuple[int, int]):
    """For every mask and ring, with as many, more and fewer keys than queries: a shift left out hides every pair."""
    for mask, size in product(MASKS, (1, 2, 3, 4)):
        chosen = shifts(mask, layout, size, *lengths)
        assert chosen[0] == 0
        assert list(chosen) == sorted(set(chosen))
        for rank, shift in product(range(size), sorted(set(range(size)) - set(chosen))):
            q_pos = np.array(shard_indices(layout, rank, size, size * lengths[0]))
            k_pos = np.array(shard_indices(layout, (rank - shift) % size, size, size * lengths[1]))
            assert not visible(mask, q_pos[:, None], k_pos[None]).any()


def test_a_window_on_contiguous_shards_needs_only_neighbours():
    assert shifts(make_mask(causal=True, window=4), "contiguous", 8, 4, 4) == (0, 1)
    assert shifts(make_mask(causal=True, window=5), "contiguous", 8, 4, 4) == (0, 1, 2)
    assert shifts(make_mask(window=1), "contiguous", 8, 4, 4) == (0, 1, 7)
    assert shifts(make_mask(chunk=4), "contiguous", 8, 4, 4) == (0,)
    assert shifts(make_mask(), "contiguous", 4, 4, 4) == (0, 1, 2, 3)
