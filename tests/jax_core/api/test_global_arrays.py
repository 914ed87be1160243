"""Attention of global arrays for an autograd that is not JAX's: with each strategy what jax_core.ring_attention gives."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from tpu_interpreter import tpus_interpreted

import jax_core
from jax_core.api.global_arrays import attention_on_mesh, plan_sequence
from jax_core.operands import Operands
from jax_core.options import Options

SIZE = 2


def inputs(length=256):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, length, heads, 32)) for key, heads in zip(keys, (2, 1, 1, 2), strict=True)]


def on_mesh(strategy, *arrays, **options):
    mesh = Mesh(np.array(jax.devices()[:SIZE]), ("ring",))
    return attention_on_mesh(Options(strategy=strategy, **options), Operands(*arrays), plan_sequence(mesh, "ring", 1), "cpu")


@pytest.mark.parametrize("strategy", ["ring", pytest.param("fused", marks=pytest.mark.slow)])
def test_every_strategy_runs(strategy):
    *qkv, dout = inputs()
    with tpus_interpreted(pltpu.InterpretParams()) if strategy == "fused" else nullcontext():
        attention = on_mesh(strategy, *qkv, causal=True)
        out, lse = jax.jit(attention.forward)(*qkv)
        gradients = jax.jit(attention.backward, static_argnums=0)(("query", "key", "value"), out, lse, dout, None, *qkv)
    expected, transpose = jax.vjp(lambda *x: jax_core.ring_attention(*x, causal=True), *qkv)
    for got, want in zip((out, *gradients), (expected, *transpose(dout)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_what_a_strategy_does_not_handle_is_refused():
    *qkv, _ = inputs()
    with pytest.raises(NotImplementedError, match=r'strategy="fused": it does not handle ALiBi slopes; use strategy="auto"'):
        on_mesh("fused", *qkv, None, None, None, None, None, None, None, jnp.ones(2))
