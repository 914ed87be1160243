"""Layouts, by hand and by brute force over small random sequences."""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import brute_force, halves, layouts, plans, positions_of, sizes
from hypothesis import given
from hypothesis import strategies as st

from jax_core.masks.layout import (
    LAYOUTS,
    Layout,
    check_layout,
    check_shard_length,
    inverse_permutation,
    padded_length,
    permutation,
    runs,
    shard_indices,
    shard_multiple,
)
from jax_core.masks.plan import Plan


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


@brute_force
@given(sizes, st.integers(2, 5), st.data())
def test_a_plan_is_a_layout(size: int, half: int, data: st.DataObject):
    """Every position lies on one rank; the runs are the shard, one for each piece; the same for all ranks at once, and again."""
    plan = data.draw(plans(size, 2 * half))
    shards = [shard_indices(plan, rank, size, plan.length) for rank in range(size)]
    assert sorted(chain(*shards)) == list(range(2 * half * size))
    order = permutation(plan, size, plan.length)
    assert order == list(chain(*shards))
    assert [order[place] for place in inverse_permutation(plan, size, plan.length)] == list(range(plan.length))
    for rank, held in enumerate(runs(plan, rank, size, 2 * half) for rank in range(size)):
        assert list(chain(*map(positions_of, held))) == shards[rank] == sorted(shards[rank])
        together = runs(plan, np.arange(size), size, 2 * half)
        assert [run.start[rank] for run in together] == [run.start for run in held]
    again = Plan(plan.piece, plan.table, areas=(1,) * size)
    assert again == plan and hash(again) == hash(plan) and str(again) == f"{plan} (imbalance 0.0%)"


PLAN = Plan(2, ((0, 3, 4), (1, 2, 5)))


@pytest.mark.parametrize("layout", [*LAYOUTS, Plan(2, ((0, 3, 5), (1, 2, 9), (4, 7, 8), (6, 10, 11)))], ids=str)
def test_runs_of_a_traced_rank(layout: Layout):
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


@brute_force
@given(layouts, sizes, st.integers(0, 5000), st.integers(1, 20))
def test_padded_length_in_buckets(layout: str, size: int, length: int, buckets: int):
    multiple = size * shard_multiple(layout)
    shortest, padded = padded_length(layout, size, length), padded_length(layout, size, length, buckets)
    assert padded % multiple == 0 and shortest <= padded
    assert padded - shortest < max(multiple, shortest / buckets)
    assert padded_length(layout, size, padded, buckets) == padded
    assert padded_length(layout, size, length + 1, buckets) >= padded


@pytest.mark.parametrize(("layout", "size"), [("contiguous", 1), ("zigzag", 2), ("striped", 3)])
def test_buckets_of_an_octave(layout: str, size: int):
    multiple = size * shard_multiple(layout)
    for below in (8, 64, 1024):
        met = {padded_length(layout, size, length, 8) for length in range(below * multiple + 1, 2 * below * multiple + 1)}
        assert met == {multiple * below * (8 + step) // 8 for step in range(1, 9)}


def test_a_plan_has_no_buckets():
    assert padded_length(PLAN, 2, 7, 8) == 12


@pytest.mark.parametrize("buckets", [-1, 2.0, True, "8", None])
def test_buckets_are_a_count(buckets):
    with pytest.raises(ValueError, match="buckets must be a number of lengths an octave"):
        padded_length("zigzag", 2, 7, buckets)


def test_what_layouts_refuse():
    with pytest.raises(ValueError, match=r"one of contiguous, zigzag, striped, or a plan that balance made; got 'spiral'"):
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


@pytest.mark.parametrize(
    ("piece", "table", "message"),
    [
        (0, ((0, 1, 2),), "piece must be a positive int"),
        (4, ((0, 1), (2, 3)), r"equally many pieces, at least 3; got \[2\] for 2 ranks"),
        (4, ((0, 1, 2), (3, 4)), r"equally many pieces, at least 3; got \[2, 3\]"),
        (4, ((0, 2, 1), (3, 4, 5)), "ascending"),
        (4, ((0, 1, 2), (3, 4, 4)), "each piece from 0 to 5 once"),
        (4, ((0, 1, 2), (3, 4, 6)), "each piece from 0 to 5 once"),
    ],
)
def test_what_is_no_plan(piece: int, table, message: str):
    with pytest.raises(ValueError, match=message):
        Plan(piece, table)


def test_a_long_table_is_not_told_whole():
    for count, end in ((4, "got ((1, 2, 3),)"), (400, " ...")):
        with pytest.raises(ValueError, match="each piece from 0 to") as error:
            Plan(4, (tuple(range(1, count)),))
        assert len(str(error.value)) < 300 and str(error.value).endswith(end)


def test_what_plans_refuse():
    assert len({PLAN, Plan(2, PLAN.table), Plan(4, PLAN.table), Plan(2, PLAN.table[::-1]), "zigzag"}) == 4
    one, other = PLAN, Plan(4, PLAN.table)
    assert one != other and other != one  # whichever has the larger digest
    large = Plan(1, tuple(tuple(range(3 * rank, 3 * rank + 3)) for rank in range(300)))
    large.check_size(int("300"))  # equal, and another object
    assert padded_length(PLAN, 2, 7) == 12
    for refuse in (lambda: runs(PLAN, 0, 4, 3), lambda: padded_length(PLAN, 1, 12), lambda: check_layout(PLAN, 3)):
        with pytest.raises(ValueError, match=r"plan \w{12} of 6 pieces of 2 is for a ring of 2, .* is a ring of [134]"):
            refuse()
    with pytest.raises(ValueError, match="12 positions, 6 on each rank; got a key shard of 4 on each of 2 ranks"):
        check_shard_length(PLAN, 4, "key shard", 2)
    with pytest.raises(ValueError, match="is for 12 positions, got 13; make another"):
        padded_length(PLAN, 2, 13)
    with pytest.raises(ValueError, match="pad it to 12"):
        permutation(PLAN, 2, 10)
