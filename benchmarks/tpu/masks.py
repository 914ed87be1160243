"""Seconds to build the masks of 1M tokens over 256 TPU chips from splash attention's mask objects, and to trace the ring with them.

    PYTHONPATH=<folder of libtpu> python -m benchmarks.tpu.masks

Nothing is run, and no TPU is needed.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_core
from benchmarks.tpu.compile import MIB, devices
from jax_core.masks.builders import build_mask

TOKENS, HEADS, KV_HEADS, DIM = 2**20, 8, 2, 128
SHAPE = TOKENS, TOKENS
MASKS: dict[str, Callable] = {
    "LocalMask": lambda head: splash.LocalMask(SHAPE, (65536, 0), 0),
    "CausalMask": lambda head: splash.CausalMask(SHAPE),
    "CausalMask & ChunkedCausalMask": lambda head: splash.CausalMask(SHAPE) & splash.ChunkedCausalMask(SHAPE, 2**17),
    "another LocalMask for each head": lambda head: splash.LocalMask(SHAPE, (4096 << head, 0), 0),
}


def main() -> None:
    mesh, rows = Mesh(np.array(devices("v5e:16x16")), ("ring",)), P(None, "ring")
    sharding = NamedSharding(mesh, rows)
    shards = [
        jax.ShapeDtypeStruct((1, TOKENS, heads, DIM), jnp.bfloat16, sharding=sharding) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    print("| mask | its making, s | all of the tracing, s | temporaries of the forward MiB |\n|---|---|---|---|")
    for name, mask in MASKS.items():

        def builder(q_len, kv_len, heads, head, reps, mask=mask):
            return mask(head)

        def attention(*arrays, builder=builder):
            return jax_core.ring_attention(*arrays, axis_name="ring", platform="pallas", layout="zigzag", mask_builder=builder)

        begin = time.perf_counter()
        build_mask(builder, *SHAPE, HEADS, HEADS // KV_HEADS)
        made = time.perf_counter()
        traced = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=rows, out_specs=rows)).trace(*shards)
        end = time.perf_counter()
        temporaries = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis().temp_size_in_bytes
        print(f"| {name} | {made - begin:.2f} | {end - made:.2f} | {temporaries / MIB:.0f} |", flush=True)


if __name__ == "__main__":
    main()
