"""Global arrays on a mesh: what the specs must say, and mask functions whose arrays lie on it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import quick_compiles
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_core import ring_attention
from jax_core.masks.dropout import seed_words


def mesh(*shape: int) -> Mesh:
    names = ("ring", "other")[: len(shape)]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def qkv(length: int = 16, batch: int = 2):
    return [jax.random.normal(jax.random.key(i), (batch, length, 2, 8)) for i in range(3)]


@pytest.mark.parametrize("given", [P("ring"), P(None, None, "ring"), (P(None, "ring"), P(None, None, "ring"))])
def test_out_specs_must_say_how_the_result_lies(given):
    with pytest.raises(ValueError, match="out_specs must be"):
        ring_attention(*qkv(), mesh=mesh(2), out_specs=given)


def test_out_specs_come_as_a_pair_with_the_lse():
    pair = P(None, "ring"), P(None, None, "ring")
    out, lse = ring_attention(*qkv(), mesh=mesh(2), out_specs=pair, return_lse=True)
    assert out.shape == (2, 16, 2, 8) and lse.shape == (2, 2, 16)
    with pytest.raises(ValueError, match="out_specs must be"):
        ring_attention(*qkv(), mesh=mesh(2), out_specs=pair[0], return_lse=True)


def test_lengths_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"query has shape .* dimension 1 is split over 4 devices"):
        ring_attention(*qkv(length=15), mesh=mesh(4))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"key": (2, 16, 2, 4)}, r"share the head dim; got query \(2, 16, 2, 8\), key \(2, 16, 2, 4\)"),
        ({"value": (2, 8, 2, 8)}, r"share length and heads; got query \(2, 16, 2, 8\), .* value \(2, 8, 2, 8\)"),
        (
            {"bias": (2, 2, 4, 16)},
            r"\[batch, heads, queries, keys of the whole sequence\] = \[2, 2, 16, 16\]; got shape \(2, 2, 4, 16",
        ),
        ({"q_segment_ids": (2, 8), "kv_segment_ids": (2, 16)}, r"q_segment_ids must have shape \[16\] .*; got \[2, 8\]"),
        (
            {"query": (2, 12, 2, 8), "layout": "zigzag"},
            "zigzag over 4 ranks needs a sequence length divisible by 8, got 12 of the q",
        ),
    ],
)
def test_errors_name_the_shapes_of_whole_arrays(changed, words):
    arrays = dict(zip(("query", "key", "value"), qkv(), strict=True))
    kinds = {"q_segment_ids": jnp.int32, "kv_segment_ids": jnp.int32}
    given = {name: jnp.zeros(x, kinds.get(name, jnp.float32)) if isinstance(x, tuple) else x for name, x in changed.items()}
    with pytest.raises(ValueError, match=words):
        ring_attention(**{**arrays, **given}, mesh=mesh(4))


def test_a_mask_builder_may_use_jax_numpy_where_the_caller_is_traced():
    def lower_triangle(q_len, kv_len, num_heads, head_idx, num_reps):
        return jnp.tril(jnp.ones((q_len, kv_len), bool))

    inputs = qkv()
    causal = ring_attention(*inputs, causal=True)
    built = jax.jit(lambda *x: ring_attention(*x, mask_builder=lower_triangle, mesh=mesh(2)))(*inputs)
    np.testing.assert_allclose(built, causal, atol=1e-6)


def test_a_mask_mod_over_an_array_that_another_axis_splits():
    """The queries are the same on both rows of the mesh, the mask function's array is not: the result and its gradient vary."""
    grid, (q, k, v) = mesh(2, 2), qkv(batch=1)
    shift = jnp.array([0, 5])

    def attention(shift, q, k, v):
        return ring_attention(q, k, v, mask_mod=lambda b, h, i, j: j <= i + shift[0], axis_name="ring")[None]

    rows = P(None, "ring")
    mapped = jax.shard_map(attention, mesh=grid, in_specs=(P("other"), rows, rows, rows), out_specs=P("other", None, "ring"))

    def expected(shift, q, k, v):
        return jnp.stack([ring_attention(q, k, v, sliding_window=(None, int(right))) for right in shift])

    wrt = (1, 2, 3)
    got = jax.jit(jax.grad(lambda *x: (mapped(*x) ** 2).sum(), wrt))(shift, q, k, v)
    want = jax.grad(lambda *x: (expected(np.array([0, 5]), *x[1:]) ** 2).sum(), wrt)(shift, q, k, v)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_mask_mod_is_read_afresh_on_every_call():
    state = {"limit": 4}

    def below_limit(batch, head, q_pos, k_pos):
        return k_pos < state["limit"]

    inputs = qkv()
    for limit in (4, 9):
        state["limit"] = limit
        visible = (jnp.arange(16) < limit)[None, None, None]
        np.testing.assert_allclose(ring_attention(*inputs, mask_mod=below_limit), ring_attention(*inputs, mask=visible), atol=1e-6)


def test_a_numpy_seed_keeps_its_64_bits():
    np.testing.assert_array_equal(seed_words(np.int64(2**40 + 5)), seed_words(2**40 + 5))


@pytest.mark.parametrize("operand", ["mask", "bias"])
def test_what_rows_share_takes_no_memory_of_rows_times_columns(operand):
    length = 2048
    q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.bool_ if operand == "mask" else jnp.float32)

    def loss(q, row):
        return ring_attention(q, q, q, **{operand: row}).sum()

    with quick_compiles(False):
        used = jax.jit(jax.grad(loss)).lower(q, row).compile().memory_analysis().temp_size_in_bytes
    assert used < length * length


def test_lists_are_arrays():
    lists = [np.asarray(x).tolist() for x in qkv(length=4)]
    np.testing.assert_allclose(ring_attention(*lists), ring_attention(*qkv(length=4)), atol=1e-6)


@pytest.mark.parametrize("ring", [("first", "second"), ("second", "first"), ("third", "first")])
def test_a_ring_over_two_axes_in_any_order(ring):
    """JAX counts ranks in the order named where a rank asks for its own, and in the mesh's where something travels."""
    grid = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("first", "second", "third"))
    inputs, rows = qkv(length=16), P(None, ring)

    def loss(attend, *inputs):
        return (attend(*inputs, causal=True) * jnp.arange(8.0)).sum()

    def on_grid(*inputs, **settings):
        return ring_attention(*inputs, **settings, mesh=grid, in_specs=(rows,) * 3, out_specs=rows)

    for got, want in zip(
        *(jax.jit(jax.grad(partial(loss, attend), (0, 1, 2)))(*inputs) for attend in (on_grid, ring_attention)), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)
