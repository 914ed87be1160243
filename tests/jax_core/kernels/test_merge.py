"""Joining partials and sinks: against one softmax over all keys and sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.kernels.contract import Partial
from jax_core.kernels.merge import join, join_sinks, join_stacked, sink_gradient, sinks_per_head

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


def in_parts(parts: int, dtype: str = "float32"):
    """Partials of ``KEYS`` keys each, where (row, part) sees nothing if the row's bit of the part is set, and NaN is its output;
    with the output and LSE of all in float64. The last row sees nothing at all."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((BATCH, HEADS, 2**parts, parts, KEYS)) * 4
    value = rng.standard_normal((BATCH, HEADS, parts, KEYS, DIM))
    unseen = (np.arange(2**parts)[:, None] >> np.arange(parts)) & 1 == 1
    weights = np.exp(np.where(unseen[..., None], -np.inf, logits))
    sums, totals = np.einsum("bhqpk,bhpkd->pbqhd", weights, value), weights.sum(-1)
    whole = totals.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        outs, lses = sums / totals.transpose(3, 0, 2, 1)[..., None], np.log(totals).transpose(3, 0, 1, 2)
        of_rows = whole.swapaxes(1, 2)[..., None]
        out, lse = np.where(of_rows == 0, 0, sums.sum(0) / of_rows), np.log(whole)
    return Partial(jnp.asarray(outs, dtype), jnp.asarray(lses, "float32")), out, lse


def listed(partials: Partial, out_dtype):
    return join([Partial(*each) for each in zip(*partials, strict=True)], out_dtype)


@pytest.mark.parametrize("joined", [listed, join_stacked])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_join(joined, parts: int):
    partials, *wanted = in_parts(parts)
    assert np.isnan(partials.out[0]).any()
    for got, want in zip(joined(partials, "float32"), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("joined", [listed, join_stacked])
def test_join_sums_in_float32_and_rounds_once(joined):
    partials, *_ = in_parts(3, "bfloat16")
    exact, _ = joined(Partial(partials.out.astype("float32"), partials.lse), "float32")
    out, lse = joined(partials, "bfloat16")
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out, exact.astype("bfloat16"))
    assert joined(partials, "float32")[0].dtype == jnp.float32


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
