"""Joining sinks: against a softmax over keys and sinks together, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.kernels.contract import Partial
from jax_core.kernels.merge import join_sinks, sink_gradient, sinks_per_head

BATCH, ROWS, HEADS, KEYS, DIM = 2, 3, 4, 5, 6


def attention(logits, value, sinks):
    """``out [batch, rows, heads, dim]``, ``lse [batch, heads, rows]`` of ``logits [batch, heads, rows, keys]`` and of
    ``sinks [heads, n]``, which have no value."""
    shape = (*logits.shape[:3], sinks.shape[1])
    every = jnp.concatenate([logits, jnp.broadcast_to(sinks[None, :, None], shape)], -1)
    lse = jax.nn.logsumexp(every, -1)
    return jnp.einsum("bhqk,bhkd->bqhd", jnp.exp(logits - lse[..., None]), value), lse


def inputs(sinks: int):
    rng = np.random.default_rng(0)
    shapes = (BATCH, HEADS, ROWS, KEYS), (BATCH, HEADS, KEYS, DIM), (HEADS, sinks)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("count", [1, 3])
def test_join_sinks(count: int):
    logits, value, sinks = inputs(count)
    out, lse = join_sinks(Partial(*attention(logits, value, sinks[:, :0])), sinks)
    wanted = attention(logits, value, sinks)
    np.testing.assert_allclose(out, wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-5, atol=1e-6)


def test_a_row_without_keys_takes_the_lse_of_its_sinks():
    empty = Partial(jnp.zeros((1, 1, 2, DIM)), jnp.full((1, 2, 1), -jnp.inf))
    out, lse = join_sinks(empty, jnp.array([[0.5, 1.5], [-jnp.inf, -jnp.inf]]))
    assert not out.any()
    np.testing.assert_allclose(lse[0, :, 0], [np.log(np.exp(0.5) + np.exp(1.5)), -np.inf], rtol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_the_gradient_of_sinks(count: int):
    logits, value, sinks = inputs(count)
    (out, lse), transpose = jax.vjp(lambda sinks: attention(logits, value, sinks), sinks)
    dout, dlse = (jnp.cos(7 * x) for x in (out, lse))
    delta = jnp.swapaxes((out * dout).sum(-1), 1, 2) - dlse
    np.testing.assert_allclose(sink_gradient(sinks, lse, delta), transpose((dout, dlse))[0], rtol=1e-4, atol=1e-5)


def test_the_gradient_of_sinks_over_rows_that_saw_nothing_is_finite():
    lse = jnp.full((1, 1, 2), -jnp.inf)
    assert not sink_gradient(jnp.full((1, 1), -jnp.inf), lse, jnp.ones((1, 1, 2))).any()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (np.arange(4), np.arange(4)[:, None]),  # one a head
        (np.arange(3), np.tile(np.arange(3), (4, 1))),  # shared by the heads
        (np.arange(6), np.tile(np.arange(6), (4, 1))),  # more of them than heads
        (np.arange(1), np.zeros((4, 1))),
        (np.arange(8).reshape(4, 2), np.arange(8).reshape(4, 2)),
    ],
)
def test_sinks_per_head(given, wanted):
    np.testing.assert_array_equal(sinks_per_head(jnp.asarray(given), 4), wanted)
