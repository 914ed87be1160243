"""A small hybrid language model in JAX, its sequence sharded over four CPU devices: short convolution and gated delta rule, then
attention, trained on a cycle of tokens. Loss and gradients are those of one device.

    python examples/jax_hybrid.py [--steps 30]

The layers are functions of arrays, so flax's and equinox's modules call them as they are. On accelerators leave out the two lines
with ``jax.config``.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import causal_conv1d, gated_delta_rule, ring_attention

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

VOCABULARY, WIDTH, HEADS, DIM, LENGTH = 16, 64, 4, 16, 256
SIZES = {"embed": (VOCABULARY, WIDTH), "conv": (3 * WIDTH, 4), "in": (WIDTH, 3 * WIDTH + 2 * HEADS), "out": (WIDTH, WIDTH)}
SIZES |= {"qkv": (WIDTH, 3 * WIDTH), "proj": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def in_heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def model(weights, tokens, **along):
    """``along``: over what the sequence is sharded; nothing on one device."""
    x = weights["embed"][tokens]
    qkv, gates = jnp.split(normed(x) @ weights["in"], [3 * WIDTH], axis=-1)
    q, k, v = map(in_heads, jnp.split(causal_conv1d(qkv, weights["conv"], activation="silu", **along), 3, axis=-1))
    decay, beta = jnp.split(gates, 2, axis=-1)
    state = gated_delta_rule(q, k, v, -jax.nn.softplus(decay), jax.nn.sigmoid(beta), qk_l2norm=True, **along)
    x = x + state.reshape(x.shape) @ weights["out"]
    q, k, v = map(in_heads, jnp.split(normed(x) @ weights["qkv"], 3, axis=-1))
    x = x + ring_attention(q, k, v, causal=True, **along).reshape(x.shape) @ weights["proj"]
    return normed(x) @ weights["head"]


def loss(weights, tokens, labels, **along):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(model(weights, tokens, **along)), labels[..., None], -1)
    return -chosen.mean()


def batch(step):
    """Rows that go round one cycle of all tokens, from anywhere, and the token after each."""
    places = np.random.default_rng(step).integers(0, VOCABULARY, (2, 1)) + np.arange(LENGTH + 1)
    tokens = np.random.default_rng(0).permutation(VOCABULARY)[places % VOCABULARY]
    return tokens[:, :-1], tokens[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
    sequence, everywhere = NamedSharding(mesh, P(None, "sp")), NamedSharding(mesh, P())
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(size, dtype=np.float32) / size[0] ** 0.5 for name, size in SIZES.items()}

    ours = jax.jit(jax.value_and_grad(partial(loss, axis_name="sp", mesh=mesh)))
    theirs = jax.jit(jax.value_and_grad(loss))
    sharded = jax.device_put(weights, everywhere), *jax.device_put(batch(0), sequence)
    for one, other in zip(jax.tree.leaves(ours(*sharded)), jax.tree.leaves(theirs(weights, *batch(0))), strict=True):
        np.testing.assert_allclose(jax.device_get(one), other, atol=1e-5, rtol=1e-4)
    print("loss and gradients are those of one device")

    weights = sharded[0]
    for step in range(steps):
        value, gradients = ours(weights, *jax.device_put(batch(step), sequence))
        weights = jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, weights, gradients)
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}: loss {float(value):.3f}", flush=True)


if __name__ == "__main__":
    main()
