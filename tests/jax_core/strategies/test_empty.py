"""No batch entry, no query, or no key: an empty result, or rows that see nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ring_mesh

from jax_core import ring_attention

SIZES = {"batch": (0, 8, 8), "queries": (2, 0, 8), "keys": (2, 8, 0), "sequence": (2, 0, 0)}


def arrays(batch: int, queries: int, keys: int):
    return [jnp.ones((batch, length, 4, 8), jnp.bfloat16) for length in (queries, keys, keys)]


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_results_and_gradients(sizes: tuple[int, int, int], ring: int):
    settings = {"axis_name": "ring", "mesh": ring_mesh(ring)} if ring > 1 else {}
    attend = partial(ring_attention, causal=True, layout="zigzag", return_lse=True, **settings)
    qkv = arrays(*sizes)
    (out, lse), transpose = jax.vjp(attend, *qkv)
    assert (out.shape, out.dtype) == (qkv[0].shape, jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((sizes[0], 4, sizes[1]), jnp.float32)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for gradient, x in zip(transpose((jnp.ones_like(out), jnp.ones_like(lse))), qkv, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(gradient, 0)


def test_sinks_are_all_there_is_without_keys():
    q, k, v = (x.astype(jnp.float32) for x in arrays(2, 8, 0))
    sinks = jnp.arange(4.0)

    def total(sinks):
        return ring_attention(q, k, v, sinks, return_lse=True)[1].sum()

    np.testing.assert_allclose(ring_attention(q, k, v, sinks, return_lse=True)[1], np.broadcast_to(sinks[:, None], (2, 4, 8)))
    np.testing.assert_allclose(jax.grad(total)(sinks), 16)  # d lse / d sink is 1 for each of 2 x 8 rows


def test_heads_and_head_dim_are_needed():
    with pytest.raises(ValueError, match="must have heads and a head dim"):
        ring_attention(*(jnp.ones((1, 4, 2, 0)),) * 3)
