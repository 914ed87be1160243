"""Layouts, by hand and by brute force over small random sequences."""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import brute_force, halves, layouts, positions_of, sizes
from hypothesis import given
from hypothesis import strategies as st

from jax_core.masks.layout import (
    LAYOUTS,
    check_layout,
    check_shard_length,
    inverse_permutation,
    padded_length,
    permutation,
    runs,
    shard_indices,
    shard_multiple,
)


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


@brute_force
@given(layouts, sizes, halves)
def test_every_position_lies_on_one_rank(layout: str, size: int, half: int):
    length = 2 * half * size
    order = permutation(layout, size, length)
    assert sorted(order) == list(range(length))
    assert [order[place] for place in inverse_permutation(layout, size, length)] == list(range(length))
    assert order == list(chain(*(shard_indices(layout, rank, size, length) for rank in range(size))))


@brute_force
@given(layouts, sizes, halves, st.data())
def test_runs_are_the_shard(layout: str, size: int, half: int, data: st.DataObject):
    """One or two runs, in shard order, also when the rank is a NumPy number."""
    rank = data.draw(st.integers(0, size - 1))
    held = runs(layout, rank, size, 2 * half)
    assert 1 <= len(held) <= 2
    assert list(chain(*map(positions_of, held))) == shard_indices(layout, rank, size, 2 * half * size)
    assert runs(layout, np.int32(rank), size, 2 * half) == held


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


@brute_force
@given(layouts, sizes, st.integers(0, 100))
def test_padded_length(layout: str, size: int, length: int):
    padded = padded_length(layout, size, length)
    assert 0 <= padded - length < size * shard_multiple(layout)
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
