"""Plans that even out the work under a mask; the areas that they go by, beside every pair of positions."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force, masks, seen_by
from hypothesis import given
from hypothesis import strategies as st

import jax_core
from jax_core.masks.areas import Grid, intervals, sampled
from jax_core.masks.layout import shard_indices
from jax_core.masks.static import Mask

PIECE, RANKS = 4, 3
LENGTH = 4 * PIECE * RANKS
PLACES = np.arange(LENGTH)


def same_document(lengths: list[int]) -> np.ndarray:
    number = np.repeat(np.arange(len(lengths)), lengths)
    number = np.concatenate([number, np.full(LENGTH - len(number), -1)])
    return (number[:, None] == number) & (number >= 0)


def check_areas(areas: Any, seen: np.ndarray, owner: np.ndarray) -> None:
    np.testing.assert_array_equal(areas.of_rows(PIECE), seen.reshape(-1, PIECE, LENGTH).sum((1, 2)))
    held = np.repeat(owner, PIECE) == np.arange(RANKS)[:, None]
    np.testing.assert_array_equal(areas.between(owner, RANKS, PIECE), held.astype(int) @ seen @ held.T)


lengths_of_documents = st.lists(st.integers(0, 15), max_size=6).filter(lambda lengths: sum(lengths) <= LENGTH)
owners = st.permutations(np.repeat(range(RANKS), LENGTH // PIECE // RANKS).tolist()).map(np.array)


@brute_force
@given(masks, st.none() | lengths_of_documents, owners)
def test_areas_are_every_visible_pair(mask: Mask, documents: list[int] | None, owner: np.ndarray):
    seen = seen_by(mask, PLACES, PLACES)
    if documents is not None:
        seen = seen & same_document(documents)
    check_areas(intervals(mask, LENGTH, documents), seen, owner)


@brute_force
@given(st.lists(st.integers(0, 20), min_size=3, max_size=3), st.integers(0, 9), st.integers(1, 9), owners)
def test_areas_of_prefixes_and_spans(prefix: list[int], start: int, length: int, owner: np.ndarray):
    """One document without a place for a prefix, one that is shorter than its prefix may be; then padding."""
    documents = [20, 0, 19]
    known = intervals(Mask(causal=True), LENGTH, documents, prefix, [(20 + start, 20 + start + length)])
    q, k = PLACES[:, None], PLACES
    both = (20 + start <= np.minimum(q, k)) & (np.maximum(q, k) < 20 + start + length)
    seen = (k <= q) | (k < np.where(q < 20, prefix[0], 20 + prefix[2])) | both
    check_areas(known, seen & same_document(documents), owner)


def test_areas_of_mask_functions():
    def visible(q, k):
        return (q * 5 + k * 3) % 7 < 4

    owner = np.arange(LENGTH // PIECE) % RANKS
    known = intervals(Mask(causal=True), LENGTH)
    seen = visible(PLACES[:, None], PLACES) & (PLACES[:, None] >= PLACES)
    check_areas(sampled(visible, known, PIECE), seen, owner)
    check_areas(Grid(seen.reshape(-1, PIECE, LENGTH // PIECE, PIECE).sum((1, 3)), PIECE), seen, owner)


def test_long_sequences_are_sampled():
    """Blocks of a power of two are counted exactly by equally spaced positions; so are the areas of a causal mask, nearly."""
    length = 2**15
    found = sampled(lambda q, k: (q // 2048 + k // 1024) % 2 == 0, intervals(Mask(causal=True), length), 1024)
    cells = np.arange(length // 1024)
    blocks = (cells[:, None] // 2 + cells) % 2 == 0
    wanted = np.where(cells < cells[:, None], 1024**2, np.where(cells == cells[:, None], 1024 * 1025 // 2, 0)) * blocks
    np.testing.assert_allclose(found.pairs, wanted, rtol=0.02)


# -------------------------------------------------------------------------------------------------------------------- plans


def drawn(kind: str, seed: int, total: int) -> list[int]:
    """Lengths of documents that fill ``total`` positions: most are short, and some very long."""
    rng, lengths, left = np.random.default_rng(seed), list[int](), total
    while left:
        length = rng.lognormal(6.5, 1.5) if kind == "lognormal" else 200 * (rng.pareto(1.1) + 1)
        lengths.append(min(left, max(1, int(length))))
        left -= lengths[-1]
    return lengths


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
def test_documents_of_very_uneven_lengths(kind: str):
    """64k tokens on 8 ranks: at most 5 % more than the mean on any rank. The steps of the ring are less even."""
    for seed in range(6):
        documents = drawn(kind, seed, 2**16)
        plan = jax_core.balance(2**16, 8, causal=True, documents=documents)
        assert plan.length == 2**16 and plan.size == 8
        work = np.array(plan.areas)
        index = np.arange(2**16) - np.repeat(np.cumsum([0, *documents[:-1]]), documents)
        np.testing.assert_array_equal(work, [(index[shard_indices(plan, rank, 8, 2**16)] + 1).sum() for rank in range(8)])
        assert plan.imbalance == work.max() / work.mean() - 1 <= 0.05
        assert plan.ring_imbalance < 0.15
        alone = jax_core.balance(2**16, 8, causal=True, documents=documents, steps=False)
        assert alone.imbalance <= 0.05 and alone.piece >= plan.piece


EVEN = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 4096},
    "chunks": {"chunk_size": 5000},
    "prefix": {"causal": True, "prefix": 20000},
    "images": {"causal": True, "spans": [(1000, 9000), (20000, 30000), (50000, 52000)]},
    "mask function": {"causal": True, "mask_mod": lambda batch, head, q, k: (q // 4096 + k // 2048) % 3 != 0},
}


@pytest.mark.parametrize("name", EVEN)
def test_masks_that_a_ring_shares_evenly(name: str):
    plan = jax_core.balance(2**16, 8, **EVEN[name])
    assert plan.imbalance <= plan.ring_imbalance <= 0.05
    assert f"imbalance {plan.imbalance:.1%}, ring_imbalance {plan.ring_imbalance:.1%}" in str(plan)


def test_neighbours_stay_together_where_that_is_even():
    assert jax_core.balance(4096, 4).table == tuple(tuple(range(4 * rank, 4 * rank + 4)) for rank in range(4))
    causal = jax_core.balance(4096, 4, causal=True)
    assert causal.table[1] == (2, 3, 12, 13) and causal.ring_imbalance < 0.001
    three = jax_core.balance(3072, 3, causal=True)  # also where the ranks are no power of two
    assert three.table == ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    window = jax_core.balance(2**16, 8, causal=True, sliding_window=256)
    assert window.table[0] == tuple(range(8))


def test_steps_are_counted_as_the_ring_takes_them():
    """At step ``s`` rank ``r`` has the keys of rank ``r - s``."""
    plan = jax_core.balance(96, 4, causal=True, documents=[50, 40], piece=2)
    seen = intervals(Mask(causal=True), 96, [50, 40])
    shards = [shard_indices(plan, rank, 4, 96) for rank in range(4)]
    for rank, step in np.ndindex(4, 4):
        keys = np.array(shards[(rank - step) % 4])
        held = sum(((seen.low[q] <= keys) & (keys < seen.high[q])).sum() for q in shards[rank])
        assert plan.steps[rank][step] == held
    largest = np.array(plan.steps).max(0).sum()
    assert plan.ring_imbalance == pytest.approx(largest / np.mean(plan.areas) - 1)


@pytest.mark.parametrize(
    ("length", "ranks", "padded", "piece"), [(1, 1, 1, 1), (5, 4, 12, 1), (100, 4, 128, 8), (50021, 8, 50176, 128)]
)
def test_any_length(length: int, ranks: int, padded: int, piece: int):
    plan = jax_core.balance(length, ranks, causal=True)
    assert (plan.length, plan.piece, plan.size) == (padded, piece, ranks)


def test_one_plan_for_documents_that_are_not_known():
    """Worse than a plan for each batch, and far better than zigzag, which leaves the others to wait for twice its mean."""
    plan = jax_core.balance(2**16, 8, documents="unknown")
    assert plan.piece == 128 and plan.table[3][:3] == (3, 11, 19) and plan.imbalance is plan.ring_imbalance is None
    assert "imbalance" not in repr(plan)
    owner = np.arange(plan.pieces) % 8
    for kind in ("lognormal", "pareto"):
        uneven = []
        for seed in range(10):
            work = intervals(Mask(causal=True), 2**16, drawn(kind, seed, 2**16)).between(owner, 8, 128).sum(1)
            uneven.append(work.max() / work.mean() - 1)
        assert np.mean(uneven) < 0.05 and max(uneven) < 0.1


def test_areas_as_they_are_given():
    """Two queries in three are of no use; the others see everything."""
    pairs = np.zeros((24, 24))
    pairs[::3] = 1
    plan = jax_core.balance(48, 4, areas=pairs)
    assert plan.imbalance == 0 and plan.piece == 2
    assert all(sum(number % 3 == 0 for number in held) == 2 for held in plan.table)
    assert jax_core.balance(48, 4, cu_seqlens=[0, 7, 30]) == jax_core.balance(48, 4, documents=[7, 23])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, {}), "length must be a positive int, got 0"),
        ((8, 2.0, {}), "ranks must be a positive int, got 2.0"),
        ((8, 2, {"piece": 0}), "piece must be a positive int, got 0"),
        ((8, 2, {"documents": [4, 5]}), "lengths >= 0 whose sum is at most 8, got a sum of 9"),
        ((8, 2, {"documents": [4], "cu_seqlens": [0, 4]}), "give the documents once"),
        ((8, 2, {"cu_seqlens": [1, 4]}), r"begin with 0, got \[1, 4\]"),
        ((8, 2, {"documents": "known"}), 'lengths, None, or "unknown" without .* got'),
        ((8, 2, {"documents": "unknown", "prefix": 3}), '"unknown" without cu_seqlens, prefix'),
        ((8, 2, {"prefix": 3}), "need causal=True"),
        ((8, 2, {"causal": True, "sliding_window": 3, "spans": [(1, 2)]}), "need causal=True, without sliding_window"),
        ((8, 2, {"causal": True, "prefix": [1, 2]}), "one for each of 1 documents; got 2"),
        ((8, 2, {"causal": True, "prefix": -1}), "prefix must not be negative"),
        ((8, 2, {"causal": True, "documents": [4, 4], "spans": [(3, 5)]}), r"within one document each, got \(3, 5\)"),
        ((8, 2, {"areas": np.ones((8, 8)), "causal": True}), "areas says all there is to know"),
        ((8, 2, {"areas": np.ones((3, 3))}), r"n a divisor of the length 8; got shape \(3, 3\)"),
        ((8, 2, {"areas": np.ones((4, 4))}), "a multiple of 2 parts, at least 3 for each rank; got 4"),
        ((8, 1, {"areas": np.ones((4, 4)), "piece": 1}), "pieces of 2 positions, got piece=1"),
    ],
)
def test_what_it_refuses(arguments, message: str):
    length, ranks, more = arguments
    with pytest.raises(ValueError, match=message):
        jax_core.balance(length, ranks, **more)


def test_it_loads_no_jax():
    code = "import sys, jax_core; jax_core.balance(4096, 4, causal=True); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
