"""What is sent round the ring arrives bit for bit, from the rank that sent it, whatever the order of the mesh's axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_core.strategies.transfers.transfer import (
    Transfer,
    finish_transfers,
    ordered_after,
    pack,
    start_transfers,
    unpack,
    wire_dtype,
)

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def random_bits(dtype: str, *shape: int) -> np.ndarray:
    """Any pattern of bits: NaNs with a payload, infinities and subnormal numbers among them."""
    rng = np.random.default_rng(len(dtype))
    return rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8).view(jnp.dtype(dtype))[..., 0]


def bits(x) -> np.ndarray:
    return np.asarray(x).view(BITS[x.dtype.itemsize])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_packed_comes_out_bit_for_bit(dtype: str, packed: bool):
    """K/V of every dtype, with ids of 32 and 64 bits and with gradients in float32 beside them."""
    with jax.enable_x64(True):
        leaves = {name: random_bits(dtype, 1, 3, 2, 5) for name in ("key", "value")}
        beside = {"segments": random_bits("int32", 1, 3), "positions": random_bits("int64", 1, 3), "missing": None}
        tree = jax.tree.map(jnp.asarray, leaves | beside | {"gradient": random_bits("float32", 4)})
        word = wire_dtype(jnp.dtype(dtype), packed=packed)
        words = jax.jit(lambda tree: pack(tree, word))(tree)
        back = jax.jit(lambda words: unpack(words, tree))(words)
    assert packed == (not isinstance(words, tuple))
    if packed:
        assert words.ndim == 1 and jnp.issubdtype(words.dtype, jnp.unsignedinteger)
        assert words.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name, leaf in tree.items():
        if leaf is not None:
            assert back[name].dtype == leaf.dtype
            np.testing.assert_array_equal(bits(back[name]), bits(leaf), err_msg=name)


AXES = [("a",), ("b",), ("a", "b"), ("b", "a"), ("c", "a"), ("c", "b", "a")]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_a_rank_receives_from_the_rank_so_many_before_it(axes: tuple[str, ...], packed: bool):
    """Ranks are counted as ``lax.axis_index`` counts them, in the order in which the axes are named: here in an order other than
    the mesh's too. Two of three transfers go equally far, and each is given back in its own place."""
    mesh, size = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c")), 2 ** len(axes)
    name = axes if len(axes) > 1 else axes[0]
    hops = (1, size - 1, 1)

    def local():
        rank = jax.lax.axis_index(name).astype(jnp.uint32)
        contents = [jnp.stack([rank, jnp.full_like(rank, 100 + i)]) for i in range(len(hops))]
        transfers = [
            Transfer(pack(content, jnp.uint32 if packed else None), hop) for content, hop in zip(contents, hops, strict=True)
        ]
        arrived = finish_transfers(start_transfers(transfers, name, size), transfers)
        return jnp.stack([jnp.stack([unpack(*pair) for pair in zip(arrived, contents, strict=True)])])

    # [ranks in the order named, transfers, (sender, number of the transfer)]
    came = np.asarray(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(name), check_vma=False))())
    assert came.shape == (size, len(hops), 2)
    for rank in range(size):
        assert came[rank].tolist() == [[(rank - hop) % size, 100 + i] for i, hop in enumerate(hops)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_to_wait_for_a_result_changes_no_bit(dtype: str):
    """Whatever the result is that is waited for."""
    with jax.enable_x64(True):
        words = jnp.asarray(random_bits("uint32", 12))
        for done in (np.zeros(3), np.full(3, np.nan), np.full(9, -np.inf), np.ones((2, 5))):
            waited = jax.jit(ordered_after)(words, jnp.asarray(done, dtype))
            np.testing.assert_array_equal(waited, words)
        (untouched,) = ordered_after((words,), jnp.zeros(3, dtype))
        np.testing.assert_array_equal(untouched, words)


def test_the_word_is_as_wide_as_the_items():
    """Packed, K/V go in words as wide as their items, so that packing is a plain copy."""
    assert [wire_dtype(jnp.dtype(dtype), packed=True) for dtype in ("float16", "bfloat16")] == [jnp.uint16] * 2
    assert [wire_dtype(jnp.dtype(dtype), packed=True) for dtype in ("float32", "float64")] == [jnp.uint32] * 2
    assert wire_dtype(jnp.dtype("float32"), packed=False) is None
