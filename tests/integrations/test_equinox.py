"""replace_attention in equinox's models: results and gradients are those of its own attention on whole sequences."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import quick_compiles
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core.integrations.equinox import RingMultiheadAttention, replace_attention
from jax_core.masks.layout import inverse_permutation, permutation

BATCH, LENGTH, WIDTH = 2, 16, 8
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
CAUSAL = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


class Block(eqx.Module):
    """A model of a user, who knows nothing of rings."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.Linear
    rotary: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key, **options):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, qk_size=4, vo_size=6, use_query_bias=True, key=one, **options)
        self.mlp = eqx.nn.Linear(WIDTH, WIDTH, key=two)
        self.rotary = eqx.nn.RotaryPositionalEmbedding(4)

    def __call__(self, x, mask=None, rotate=True):
        def turned(q, k, v):
            return jax.vmap(self.rotary, 1, 1)(q), jax.vmap(self.rotary, 1, 1)(k), v

        return jax.vmap(self.mlp)(x + self.attention(x, x, x, mask, process_heads=turned if rotate else None))


MODEL = Block(jax.random.key(1))


@pytest.fixture(autouse=True)
def without_optimisations():
    with quick_compiles():  # the programs are small and run once
        yield


def grid() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("sp",))


def results(call, model, x):
    weight = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    loss = eqx.filter_value_and_grad(lambda both: (call(*both) * weight).sum())
    return jax.tree.leaves((call(model, x), eqx.filter(loss((model, x)), eqx.is_array)))


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


@pytest.mark.parametrize("mask", [CAUSAL, jnp.stack([CAUSAL, CAUSAL.T])], ids=["one", "per head"])
def test_a_model_on_a_mesh(mask):
    def call(model, x):
        return eqx.filter_vmap(model, in_axes=(0, None))(x, mask)

    theirs = results(call, MODEL, X)
    sharded = jax.device_put(X, NamedSharding(grid(), P(None, "sp")))
    assert_same(results(eqx.filter_jit(call), replace_attention(MODEL, mesh=grid(), axis_name="sp"), sharded), theirs)
    assert_same(results(call, replace_attention(MODEL), X), theirs)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_model_inside_shard_map(layout):
    """Without rotary embeddings, which would count from each shard's first token."""
    theirs = results(lambda model, x: jax.vmap(partial(model, rotate=False), (0, None))(x, CAUSAL), MODEL, X)
    order, back = (np.asarray(f(layout, 2, LENGTH)) for f in (permutation, inverse_permutation))

    def call(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)

        @jax.jit
        @partial(jax.shard_map, mesh=grid(), in_specs=(P(), P(None, "sp")), out_specs=P(None, "sp"))
        def mapped(arrays, x):
            return jax.vmap(partial(eqx.combine(arrays, static), rotate=False))(x)

        return mapped(arrays, x[:, order])[:, back]

    assert_same(results(call, replace_attention(MODEL, axis_name="sp", layout=layout, causal=True), X), theirs)


def test_parameters_and_their_places_stay():
    replaced = replace_attention({"blocks": [MODEL, MODEL], "head": MODEL.mlp}, causal=True)
    assert isinstance(replaced["blocks"][1].attention, RingMultiheadAttention)
    assert replaced["blocks"][0].attention.query_proj.weight is MODEL.attention.query_proj.weight
    assert replaced["head"] is MODEL.mlp or replaced["head"].weight is MODEL.mlp.weight
    ours, theirs = jax.tree.leaves(replace_attention(MODEL)), jax.tree.leaves(MODEL)
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
    again = replace_attention(replaced, sliding_window=[2, 0])
    assert again["blocks"][0].attention.settings.sliding_window == (2, 0)
    assert isinstance(replace_attention(MODEL.attention), RingMultiheadAttention)


def test_dropout_follows_the_key_and_not_the_ring():
    dropping = Block(jax.random.key(1), dropout_p=0.5).attention
    ring = replace_attention(dropping, mesh=grid(), axis_name="sp")
    alone, x, key = replace_attention(dropping), X[0], jax.random.key(3)
    np.testing.assert_allclose(ring(x, x, x, key=key), alone(x, x, x, key=key), atol=2e-6)
    assert not np.allclose(alone(x, x, x, key=key), alone(x, x, x, key=jax.random.key(4)))
    for layer in (alone, eqx.nn.inference_mode(alone)):
        options = {"inference": True} if layer is alone else {}
        np.testing.assert_allclose(layer(x, x, x, **options), dropping(x, x, x, inference=True), atol=2e-6)
    many = jax.vmap(lambda key: alone(x, x, x, key=key))(jax.random.split(key, 100))
    np.testing.assert_allclose(many.mean(0), dropping(x, x, x, inference=True), atol=6 * float(many.std(0).max()) / 10)
    keys = jax.random.split(key, BATCH)
    batched = jax.vmap(lambda x, key: ring(x, x, x, key=key))(X, keys)
    for one, x, key in zip(batched, X, keys, strict=True):
        np.testing.assert_allclose(one, alone(x, x, x, key=key), atol=2e-6)


def test_what_cannot_be_done_is_refused():
    x, layer = X[0], replace_attention(Block(jax.random.key(1), dropout_p=0.5).attention)
    with pytest.raises(ValueError, match="needs key="):
        layer(x, x, x)
    with pytest.raises(ValueError, match=r"equinox\.filter_jit"):
        jax.jit(lambda layer: layer(x, x, x, key=jax.random.key(0)))(layer)
    with pytest.raises(ValueError, match="sequences of one length, got 16 and 3"):
        layer(x, x, x[:3], inference=True)
    with pytest.raises(ValueError, match="process_heads must keep the shapes"):
        layer(x, x, x, inference=True, process_heads=lambda q, k, v: (q[:3], k, v))
    with pytest.raises(ValueError, match=r"Linear has no equinox\.nn\.MultiheadAttention"):
        replace_attention(MODEL.mlp)
    with pytest.warns(UserWarning, match="say inference="):
        layer(x, x, x, deterministic=True)
