"""The native JAX API on four CPU devices: in shard_map, with a mesh, and its gradients, compared with the same call on one device.

    python examples/jax_native.py

On accelerators leave out the two lines with ``jax.config``; the rest stays as it is.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import ring_attention

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

LENGTH, HEADS, DIM = 1024, 4, 32
mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
sequence = P(None, "sp", None, None)  # [batch, seq, heads, dim], split along the sequence

*whole, weights = np.random.default_rng(0).standard_normal((4, 1, LENGTH, HEADS, DIM), dtype=np.float32)
sharded = jax.device_put(whole, NamedSharding(mesh, sequence))


# (a) Inside shard_map, within your own per-device code: name the axis.
@partial(jax.shard_map, mesh=mesh, in_specs=(sequence,) * 3, out_specs=sequence)
def in_shard_map(query, key, value):
    return ring_attention(query, key, value, causal=True, axis_name="sp")


# (b) On sharded arrays: give the mesh and the axis, and the call does the shard_map for you.
def with_mesh(query, key, value):
    return ring_attention(query, key, value, causal=True, axis_name="sp", mesh=mesh)


# (c) On one device: neither.
def on_one_device(query, key, value):
    return ring_attention(query, key, value, causal=True)


def loss(attention, query, key, value):
    return jnp.sum(attention(query, key, value) * weights)


def run(attention, *arrays):
    out = jax.jit(attention)(*arrays)
    gradients = jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*arrays)
    return jax.device_get((out, *gradients))


expected = run(on_one_device, *whole)
for attention in (in_shard_map, with_mesh):
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), run(attention, *sharded), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=f"{name} of {attention.__name__}")
        print(f"{attention.__name__:>12} {name:>3}: largest difference to one device {abs(ours - theirs).max():.1e}")
