"""On a mesh of several axes arrays stay split as they are: nothing is gathered, and no row of the mesh repeats another's work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ring_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import ring_attention

SHAPE = (4, 16, 2, 8)


def grid(*types: AxisType) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4], axis_types=types or (AxisType.Auto,) * 2)


def placed(mesh: Mesh, spec: P, shape: tuple[int, ...] = SHAPE) -> list[jax.Array]:
    return [jax.device_put(jax.random.normal(jax.random.key(i), shape), NamedSharding(mesh, spec)) for i in range(3)]


def loss(mesh: Mesh, *qkv: jax.Array) -> jax.Array:
    return (ring_attention(*qkv, causal=True, mesh=mesh, axis_name="seq") ** 2).sum()


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "under jit"])
def test_the_batch_stays_split(traced: bool):
    mesh = grid()
    qkv = placed(mesh, P("data", "seq"))

    def attention(*qkv):
        return ring_attention(*qkv, causal=True, mesh=mesh, axis_name="seq")

    out = (jax.jit(attention) if traced else attention)(*qkv)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "seq")), 4)
    np.testing.assert_allclose(out, ring_attention(*map(np.asarray, qkv), causal=True), atol=1e-6)


def test_nothing_is_gathered():
    mesh = grid()
    program = jax.jit(jax.grad(lambda *qkv: loss(mesh, *qkv), (0, 1, 2))).lower(*placed(mesh, P("data", "seq"))).compile().as_text()
    assert "collective-permute" in program
    assert "all-gather" not in program and "all-to-all" not in program


def test_heads_stay_split():
    mesh = grid()
    out = ring_attention(*placed(mesh, P(None, "seq", "data")), mesh=mesh, axis_name="seq")
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "seq", "data")), 4)


def test_arrays_that_are_whole_stay_whole():
    mesh = grid()
    out = ring_attention(*placed(mesh, P(None, "seq")), mesh=mesh, axis_name="seq")
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "seq")), 4)


def test_a_batch_that_does_not_divide_is_not_split():
    mesh = grid()
    qkv = placed(mesh, P(None, "seq"), (3, *SHAPE[1:]))
    got = jax.jit(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis_name="seq"))(*qkv)
    np.testing.assert_allclose(got, ring_attention(*map(np.asarray, qkv)), atol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "under jit"])
def test_explicit_axes_are_kept_in_the_type(traced: bool):
    mesh = grid(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        qkv = placed(mesh, P("data", "seq"))

        def attention(*qkv):
            out = ring_attention(*qkv, mesh=mesh, axis_name="seq")
            assert jax.typeof(out).sharding.spec[:2] == ("data", "seq")
            return out

        out = (jax.jit(attention) if traced else attention)(*qkv)
    np.testing.assert_allclose(out, ring_attention(*map(np.asarray, qkv)), atol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "under jit"])
@pytest.mark.parametrize("said", [dict(out_specs=P(None, "seq")), dict(in_specs=(None, P(None, "seq"), P(None, "seq")))])
def test_what_other_specs_say_counts(said: dict, traced: bool):
    """However the query lies: a program that runs eagerly runs under jit."""
    mesh = grid()
    qkv = placed(mesh, P("data", "seq"))

    def attention(*qkv):
        return ring_attention(*qkv, mesh=mesh, axis_name="seq", **said)

    out = (jax.jit(attention) if traced else attention)(*qkv)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "seq")), 4)


def test_mask_functions_and_dropout_count_the_whole_batch():
    mesh = grid()
    qkv = placed(mesh, P("data", "seq"))
    settings = dict(mask_mod=lambda b, h, q, k: (q + k) % 4 != b, dropout_prob=0.3, dropout_seed=5)
    got = jax.jit(lambda *qkv: ring_attention(*qkv, **settings, mesh=mesh, axis_name="seq"))(*qkv)
    np.testing.assert_allclose(got, ring_attention(*map(np.asarray, qkv), **settings), atol=1e-6)


def test_a_bias_in_the_place_of_sinks_is_refused():
    """It was taken for sinks [heads, sinks] where there are as many queries as heads."""
    q, k = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 5, 2, 8))
    with pytest.raises(ValueError, match=r"softmax_aux.*sinks.*bias=") as error:
        ring_attention(q, k, k, jnp.ones((2, 5)))
    assert "(2, 5)" in str(error.value)
    ring_attention(q, k, k, jnp.ones((2, 3)))
    ring_attention(q, k, k, bias=jnp.ones((2, 5)))


def test_a_shard_of_a_bias_in_the_place_of_sinks_is_refused():
    mesh, rows = ring_mesh(2), P(None, "ring")

    def attention(q, k, bias):
        return ring_attention(q, k, k, bias, axis_name="ring")

    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(rows, rows, P("ring")), out_specs=rows)
    with pytest.raises(ValueError, match=r"softmax_aux.*\(2, 10\).*bias="):
        mapped(jnp.ones((1, 4, 2, 8)), jnp.ones((1, 10, 2, 8)), jnp.ones((4, 10)))
