"""The columns of a bias or mask that belong to a shard of keys, beside NumPy's own indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.masks.layout import LAYOUTS, Layout, runs, shard_indices
from jax_core.masks.plan import Plan
from jax_core.strategies.pairs.bias_slices import put_slice, take_slice

SIZE, SHARD = 3, 4
EACH = (*LAYOUTS, Plan(1, ((1, 2, 5, 11), (0, 3, 7, 8), (4, 6, 9, 10))))
WHOLE = np.random.default_rng(0).standard_normal((2, 1, 5, SIZE * SHARD)).astype(np.float32)


def columns_of(layout: Layout, rank: int) -> list[int]:
    return shard_indices(layout, rank, SIZE, SIZE * SHARD)


@pytest.mark.parametrize("layout", EACH, ids=str)
def test_a_shards_columns_come_in_the_shards_order(layout: Layout):
    """Also where the rank is traced, as it is inside shard_map; and booleans as well as numbers."""
    take = jax.jit(lambda x, rank: take_slice(x, runs(layout, rank, SIZE, SHARD)))
    for rank in range(SIZE):
        for whole in (WHOLE, WHOLE > 0):
            np.testing.assert_array_equal(take(whole, rank), whole[..., columns_of(layout, rank)])
            np.testing.assert_array_equal(take_slice(whole, runs(layout, rank, SIZE, SHARD)), take(whole, rank))


@pytest.mark.parametrize("layout", EACH, ids=str)
def test_putting_replaces_these_columns_and_no_other(layout: Layout):
    put = jax.jit(lambda x, columns, rank: put_slice(x, columns, runs(layout, rank, SIZE, SHARD)))
    new = np.random.default_rng(1).standard_normal((2, 1, 5, SHARD)).astype(np.float32)
    for rank in range(SIZE):
        expected = WHOLE.copy()
        expected[..., columns_of(layout, rank)] = new
        np.testing.assert_array_equal(put(WHOLE, new, rank), expected)


@pytest.mark.parametrize("layout", EACH, ids=str)
def test_all_shards_put_together_are_the_transpose_of_taking(layout: Layout):
    """As the gradient of the bias is gathered: every rank's columns are written once, into zeros."""

    def cut(x):
        return jnp.stack([take_slice(x, runs(layout, rank, SIZE, SHARD)) for rank in range(SIZE)])

    shards = np.random.default_rng(2).standard_normal((SIZE, 2, 1, 5, SHARD)).astype(np.float32)
    gathered = jnp.zeros(WHOLE.shape)
    for rank in range(SIZE):
        gathered = put_slice(gathered, shards[rank], runs(layout, rank, SIZE, SHARD))
    (transposed,) = jax.vjp(cut, WHOLE)[1](shards)
    np.testing.assert_array_equal(gathered, transposed)
