"""RingAttentionFn in flax's layers: their results and gradients are those of flax's own attention on whole arrays."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import quick_compiles
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import ring_attention
from jax_core.integrations.flax import RingAttentionFn
from jax_core.masks.layout import inverse_permutation, permutation

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, WIDTH, HEADS = 2, 16, 8, 4
ROWS = P("dp", "sp")
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
CAUSAL = nn.make_causal_mask(X[..., 0])  # float, as flax makes it
PADDING = nn.make_attention_mask(jnp.ones((BATCH, LENGTH)), jnp.arange(LENGTH) < jnp.array([[16], [11]]))


@pytest.fixture(autouse=True)
def without_optimisations():
    with quick_compiles():  # the programs are small and run once
        yield


def grid() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "sp"))


def linen(attention_fn=nn.dot_product_attention, **options):
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn, **options)


VARIABLES = linen().init(jax.random.key(1), X)


def results(apply, *arguments):
    """The output, and the gradients of parameters and input, of a function of variables and input."""
    out, pull = jax.vjp(apply, *arguments)
    return jax.tree.leaves((out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))))


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("mask", [None, nn.combine_masks(CAUSAL, PADDING)], ids=["no mask", "causal and padding"])
def test_linen_on_a_mesh_under_jit(mask):
    theirs = results(lambda v, x: linen().apply(v, x, mask=mask), VARIABLES, X)
    sharded = jax.device_put(X, NamedSharding(grid(), ROWS))
    layer = linen(RingAttentionFn(mesh=grid(), axis_name="sp"))
    assert_same(results(jax.jit(lambda v, x: layer.apply(v, x, mask=mask)), VARIABLES, sharded), theirs)
    assert_same(results(lambda v, x: linen(RingAttentionFn()).apply(v, x, mask=mask), VARIABLES, X), theirs)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_linen_inside_shard_map(layout):
    """A causal rule in the settings, and a padding mask: rows of the shard, all columns."""
    theirs = results(lambda v, x: linen().apply(v, x, mask=nn.combine_masks(CAUSAL, PADDING)), VARIABLES, X)
    layer = linen(RingAttentionFn(axis_name="sp", layout=layout, causal=True))
    order, back = (np.asarray(f(layout, 2, LENGTH)) for f in (permutation, inverse_permutation))

    @jax.jit
    @partial(jax.shard_map, mesh=grid(), in_specs=(P(), ROWS, P("dp", None, "sp")), out_specs=ROWS)
    def attention(variables, x, mask):
        return layer.apply(variables, x, mask=mask)

    rows = jnp.broadcast_to(PADDING, (BATCH, 1, LENGTH, LENGTH))[:, :, order]
    assert_same(results(lambda v, x: attention(v, x[:, order], rows)[:, back], VARIABLES, X), theirs)


def test_nnx_with_grouped_heads():
    mesh = grid()

    def layer(**options):
        return nnx.MultiHeadAttention(HEADS, WIDTH, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **options)

    def run(model, x, where):
        graph, parameters = nnx.split(model)
        call = jax.jit(lambda parameters, x: nnx.merge(graph, parameters)(x, mask=PADDING, is_causal=True))
        return results(call, parameters, jax.device_put(x, where))

    theirs = run(layer(), X, jax.devices()[0])
    ours = layer(attention_fn=RingAttentionFn(mesh=mesh, axis_name="sp"))
    assert_same(run(ours, X, NamedSharding(mesh, ROWS)), theirs)
    step = nnx.jit(lambda model, x: model(x, mask=PADDING, is_causal=True))  # the settings are part of what it looks programs up by
    np.testing.assert_allclose(step(ours, X), theirs[0], atol=2e-6)


def test_a_function_like_flaxs():
    """A bias, any number of batch dims, dtypes."""
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 3, 6, HEADS, 8)) for i in range(3))
    bias, mask = (
        jax.random.normal(jax.random.key(4), (3, HEADS, 6, 6)),
        jax.random.bernoulli(jax.random.key(5), 0.7, (2, 3, 1, 6, 6)),
    )
    mask = mask | jnp.eye(6, dtype=bool)  # a row without any key is where flax gives a mean
    ours = RingAttentionFn()
    np.testing.assert_allclose(ours(q, k, v, bias, mask), nn.dot_product_attention(q, k, v, bias, mask), atol=1e-6)
    single = q[0, 0], k[0, 0], v[0, 0]
    np.testing.assert_allclose(ours(*single), nn.dot_product_attention(*single), atol=1e-6)
    for options in ({"dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16, "force_fp32_for_softmax": True}, {"precision": "highest"}):
        got, want = ours(q, k, v, **options), nn.dot_product_attention(q, k, v, **options)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(float), want.astype(float), atol=0.03 if "dtype" in options else 1e-6)
    mixed = ours(q, k, v.astype(jnp.bfloat16), promote_dtype=lambda arrays, dtype: [x.astype(jnp.float16) for x in arrays])
    assert mixed.dtype == jnp.float16


def test_precision_reaches_the_products():
    q = jnp.ones((1, 4, 2, 8))
    program = str(jax.make_jaxpr(lambda q: RingAttentionFn()(q, q, q, precision="high"))(q))
    assert set(re.findall(r"Precision\.(\w+)", program)) == {"HIGH"}


def test_further_arrays_of_a_batch():
    ids = jnp.array([[0] * 6 + [1] * 10, [0] * 16])
    same = ids[:, None, :, None] == ids[:, None, None, :]
    theirs = linen().apply(VARIABLES, X, mask=same)
    ours = linen(partial(RingAttentionFn(mesh=grid(), axis_name="sp"), q_segment_ids=ids, kv_segment_ids=ids)).apply(VARIABLES, X)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_dropout_is_the_rings_and_follows_the_key():
    options = dict(dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    q, k, v = (jax.random.normal(jax.random.key(i), (BATCH, LENGTH, HEADS, 8)) for i in range(3))
    key = jax.random.key(7)
    alone = RingAttentionFn()(q, k, v, dropout_rng=key, **options)
    on_mesh = RingAttentionFn(mesh=grid(), axis_name="sp")(q, k, v, dropout_rng=key, **options)
    np.testing.assert_allclose(on_mesh, alone, atol=2e-6)
    seed = jax.random.bits(key, (2,), jnp.uint32)
    np.testing.assert_allclose(alone, ring_attention(q, k, v, dropout_prob=0.5, dropout_seed=seed), atol=1e-6)
    many = jax.vmap(lambda key: RingAttentionFn()(q, k, v, dropout_rng=key, **options))(jax.random.split(key, 100))
    np.testing.assert_allclose(many.mean(0), nn.dot_product_attention(q, k, v), atol=6 * float(many.std(0).max()) / 10)
    assert np.array_equal(RingAttentionFn()(q, k, v, **options | {"deterministic": True}), RingAttentionFn()(q, k, v))
    layer = linen(RingAttentionFn(mesh=grid(), axis_name="sp"), **options)
    first, again, other = (layer.apply(VARIABLES, X, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: linen(RingAttentionFn()).apply(VARIABLES, X, sow_weights=True), NotImplementedError, "weights cannot be sown"),
        (
            lambda: linen(
                RingAttentionFn(), qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
            ).apply(VARIABLES, X),
            NotImplementedError,
            "replace products that this attention makes",
        ),
        (
            lambda: linen(RingAttentionFn(), dropout_rate=0.1, deterministic=False).apply(
                VARIABLES, X, rngs={"dropout": jax.random.key(0)}
            ),
            ValueError,
            "broadcast_dropout=False",
        ),
        (lambda: RingAttentionFn()(X, X, X, dropout_rate=0.1, broadcast_dropout=False), ValueError, "needs a dropout_rng"),
        (lambda: RingAttentionFn()(X[0], X, X), ValueError, "the same batch dims"),
        (lambda: RingAttentionFn(windows=3), TypeError, "windows"),
    ],
)
def test_what_cannot_be_done_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_mask_of_local_columns_is_refused():
    layer = linen(RingAttentionFn(axis_name="sp"))

    @partial(jax.shard_map, mesh=grid(), in_specs=(P(), ROWS), out_specs=ROWS)
    def attention(variables, x):
        return layer.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))

    with pytest.raises(ValueError, match="keys of the whole sequence"):
        attention(VARIABLES, X)


def test_decoding_works_without_a_ring_and_is_refused_on_one():
    for attention_fn in (RingAttentionFn(), RingAttentionFn(mesh=grid(), axis_name="sp")):
        layer = linen(attention_fn, decode=True)
        cache = layer.init(jax.random.key(1), X)["cache"]
        theirs = linen(decode=True)
        variables = {**VARIABLES, "cache": cache}
        if attention_fn.sharded:
            with pytest.raises(NotImplementedError, match="decode=True: a key/value cache cannot be used on a ring"):
                layer.apply(variables, X[:, :1], mutable=["cache"])
            continue
        for step in range(3):
            token = X[:, step : step + 1]
            ours, state = layer.apply(variables, token, mutable=["cache"])
            want, _ = theirs.apply(variables, token, mutable=["cache"])
            np.testing.assert_allclose(ours, want, atol=2e-6)
            variables = {**VARIABLES, **state}


def test_importing_it_does_not_import_flax():
    code = "import sys, jax_core, jax_core.integrations.flax; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
