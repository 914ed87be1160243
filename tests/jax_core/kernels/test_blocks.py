"""Shards in blocks, and the block sparsity map, against every pair of positions."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.kernels.blocks import (
    BlockLayout,
    block_layout,
    block_sparsity,
    dense_mask,
    distance,
    in_blocks,
    index,
    out_of_blocks,
    same_rows,
    starts,
)
from jax_core.kernels.contract import Extras, Pair, Runs, Scores
from jax_core.masks.functions import Predicate
from jax_core.masks.layout import LAYOUTS, Layout, Run, runs
from jax_core.masks.plan import Plan
from jax_core.masks.static import Mask, make_mask, visible

ZIGZAG = (Run(6, 1, 3), Run(15, 1, 3))


def test_block_layout():
    assert block_layout(ZIGZAG, 2) == BlockLayout(runs=2, length=3, stride=1, block=2, blocks_per_run=2, blocks=4, even=False)
    assert block_layout((Run(1, 4, 6),), 3) == BlockLayout(
        runs=1, length=6, stride=4, block=3, blocks_per_run=2, blocks=2, even=True
    )


def test_every_run_is_filled_up_to_whole_blocks():
    where, x = block_layout(ZIGZAG, 2), jnp.arange(1, 7)[None]
    np.testing.assert_array_equal(in_blocks(x, 1, where, 0), [[1, 2, 3, 0, 4, 5, 6, 0]])
    np.testing.assert_array_equal(in_blocks(x, -1, where), [[1, 2, 3, 3, 4, 5, 6, 6]])
    np.testing.assert_array_equal(out_of_blocks(in_blocks(x, 1, where, 0), 1, where), x)


def test_index_and_starts():
    np.testing.assert_array_equal(index(ZIGZAG), [6, 7, 8, 15, 16, 17])
    np.testing.assert_array_equal(starts(make_pair(ZIGZAG, (Run(1, 4, 6),))), [6, 15, 1, 0, 0])
    np.testing.assert_array_equal(starts(make_pair(ZIGZAG, ZIGZAG, Extras(origin=jnp.array([2, 3])))), [6, 15, 6, 15, 2, 3])


def test_same_rows():
    one, two = jnp.zeros((1, 3)), jnp.zeros((2, 5))
    assert [x.shape for x in same_rows(one, two)] == [(2, 3), (2, 5)]
    assert same_rows(None, None) == (None, None)


def test_distance():
    q, k = jnp.array([-(2**31), 5], jnp.int32)[:, None], jnp.array([2**31 - 1, -3], jnp.int32)
    np.testing.assert_allclose(distance(Mask(any_position=True), q, k, jnp.float32), [[2.0**32, 2.0**31], [2.0**31, 8]])
    np.testing.assert_array_equal(distance(Mask(), jnp.array([5]), jnp.array([7]), jnp.float32), [2])


NO_EXTRAS, NO_MASK = Extras(), make_mask()
IDS = {
    "": {},
    "segments": {"q_segment_ids": [[0, 0, 0, 1, 1, 1, 1, -1]], "kv_segment_ids": [[0, 0, 0, 0, 1, 1, -1, -1], [1] * 8]},
    "positions": {"q_position_ids": [[5, 9, 2, 3, 2**31 - 1, 0, 1, 4]], "kv_position_ids": [[-(2**31), 1, 2, 3, 3, 2, 1, 0]]},
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("layout", [*LAYOUTS, Plan(2, ((1, 2, 4, 7), (0, 3, 5, 6)))], ids=str)
@pytest.mark.parametrize("mask", [make_mask(), make_mask(True), make_mask(window=(3, 1)), make_mask(chunk=5)], ids=str)
def test_the_block_sparsity_map(mask: Mask, layout: Layout, ids: str):
    """Whatever is visible is in a block that is; a block called whole has nothing that is hidden, and no place for padding. Exactly
    so where positions are runs of stride 1."""
    mask = replace(mask, any_position=ids == "positions")
    extras = Extras(**{name: jnp.asarray(array, jnp.int32) for name, array in IDS[ids].items()})
    for source in range(2):
        q_runs, k_runs = runs(layout, 1, 2, 8), runs(layout, source, 2, 8)
        q, k = block_layout(q_runs, 3), block_layout(k_runs, 3)
        visible, whole = (np.asarray(x) for x in block_sparsity(q, k, make_pair(q_runs, k_runs, extras, mask)))
        tiles = in_tiles(in_tiles(seen_pairs(mask, q_runs, k_runs, extras), q, 1), k, 2)
        tiles = tiles.reshape(-1, q.blocks, 3, k.blocks, 3)
        some, every = tiles.any((2, 4)), tiles.all((2, 4))
        assert not (some & ~visible).any()
        assert not (whole & ~(visible & every)).any()
        if not ids and layout != "striped":
            np.testing.assert_array_equal(visible, some)
            np.testing.assert_array_equal(whole, every)


def make_pair(q_runs: Runs, k_runs: Runs, extras: Extras = NO_EXTRAS, mask: Mask = NO_MASK) -> Pair:
    """Of two batch entries, four heads of queries and two of keys."""
    q, k = (jnp.zeros((2, sum(run.length for run in held), heads, 8)) for held, heads in ((q_runs, 4), (k_runs, 2)))
    return Pair(q, k, k, q_runs, k_runs, Scores(mask, 1.0), extras)


def in_tiles(x: np.ndarray, where: BlockLayout, axis: int) -> np.ndarray:
    """False where a run is filled up to whole blocks."""
    parts = []
    for part in np.split(x, where.runs, axis):
        width = [(0, 0)] * x.ndim
        width[axis] = (0, where.blocks_per_run * where.block - where.length)
        parts.append(np.pad(part, width))
    return np.concatenate(parts, axis)


def seen_pairs(mask: Mask, q_runs, k_runs, extras: Extras) -> np.ndarray:
    """bool ``[batch|1, queries, keys]``"""
    held = (q_runs, extras.q_position_ids), (k_runs, extras.kv_position_ids)
    q_at, k_at = (index(each)[None] if ids is None else ids for each, ids in held)
    seen = visible(mask, np.asarray(q_at, np.int64)[:, :, None], np.asarray(k_at, np.int64)[:, None])
    if extras.q_segment_ids is not None:
        q_ids, k_ids = np.asarray(extras.q_segment_ids)[:, :, None], np.asarray(extras.kv_segment_ids)[:, None]
        seen = seen & (q_ids == k_ids) & (q_ids >= 0)
    return seen


def test_a_dense_mask_of_a_mask_and_a_mask_function():
    """By place or by position; batch entries and heads only where the function tells them apart."""
    pair = partial(make_pair, (Run(3, 1, 3),), (Run(3, 1, 3),))
    places, ids = np.arange(3, 6), jnp.array([[0, 1, 2]])
    mask = jnp.array([True, False, True]).reshape(1, 1, 1, 3)
    assert dense_mask(pair(Extras()), []) is None
    np.testing.assert_array_equal(dense_mask(pair(Extras(mask=mask)), []), mask)
    by_place = Predicate("places", "index", lambda arrays, b, h, q, k: q + k < arrays[0])
    wanted = (places[:, None] + places < 9) & np.asarray(mask)
    found = dense_mask(pair(Extras(mask=mask, q_position_ids=ids, kv_position_ids=ids)), [(by_place, (9,))])
    np.testing.assert_array_equal(found, wanted)
    by_head = Predicate("heads", "position", lambda arrays, b, h, q, k: q + k < h)
    found = dense_mask(pair(Extras(q_position_ids=ids, kv_position_ids=ids)), [(by_head, ())])
    np.testing.assert_array_equal(found, np.add.outer(range(3), range(3))[None, None] < np.arange(4).reshape(1, 4, 1, 1))
