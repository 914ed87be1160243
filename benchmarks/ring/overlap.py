"""Does the rotation overlap with the kernels? Compares a pass with the same pass without any transfer.

In JAX alone, to exclude the bridge's host work. Without rotation every step works on what the rank already has: the
same kernels on the same shapes, with a different result.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_core
from benchmarks.harness.report import short
from benchmarks.harness.systems import Case
from benchmarks.harness.timing import Timed
from benchmarks.ring.run import Run
from torch_bridge.mesh.jax_mesh import jax_mesh
from torch_bridge.mesh.rings import resolve

LONGER = 1.05  # how much longer the pass may take, from 8k tokens a GPU up
ROTATING, STILL = "rotating", "nothing travels"
# K and V are sent in one collective, however large they are (benchmarks/gpu.md).
ONE_COLLECTIVE = {"xla_gpu_collective_permute_combine_threshold_bytes": str(2**40)}


def overlap(run: Run) -> None:
    devices = jax_mesh(resolve()).devices
    for length in run.options.overlap_lengths:
        name = f"overlap at {short(length)} tokens a GPU"
        if not run.may_begin(name):
            return
        case = run.case(name, length * run.team.size)
        systems = {
            ROTATING: compiled_passes(Mesh(devices, (ROTATING,)), case, run.options.platform),
            STILL: compiled_passes(Mesh(devices, (STILL,)), case, run.options.platform),
        }
        for phase in ("forward", "backward"):
            times, _ = run.take_turns({name: passes[phase] for name, passes in systems.items()}, rounds=10)
            medians = {name: run.add_times(case, name, phase, taken) for name, taken in times.items()}
            longer = medians[ROTATING] / medians[STILL] if len(medians) == 2 else None
            run.report.ratio(f"{name}, {phase}: rotating / nothing travels", longer, at_most=LONGER)


def compiled_passes(mesh: Mesh, case: Case, platform: str) -> dict[str, Timed]:
    """Forward and backward, each as a separate program, compiled and run once. On a mesh whose axis is named STILL nothing is sent.

    JAX caches traces by mesh among other things, so the two variants have separate meshes."""
    *qkv, dout = global_arrays(mesh, case)
    attention = partial(jax_core.ring_attention, causal=True, layout="zigzag", platform=platform, mesh=mesh)
    stays = mock.patch.object(jax.lax, "ppermute", lambda x, axis_name, perm: x)
    with stays if mesh.axis_names == (STILL,) else nullcontext():
        forward = compiled(attention, *qkv)
        _, transpose = jax.jit(lambda *qkv: jax.vjp(attention, *qkv))(*qkv)
        backward = compiled(lambda transpose, dout: transpose(dout), transpose, dout)
    return {
        "forward": Timed(partial(forward, *qkv), jax.block_until_ready),
        "backward": Timed(partial(backward, transpose, dout), jax.block_until_ready),
    }


def global_arrays(mesh: Mesh, case: Case) -> list[jax.Array]:
    """q, k, v and the output's gradient, `[1, length, heads, dim]`, standard normal, the sequence split over the mesh."""
    split = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=split)
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    return [normal(jax.random.key(seed), (1, case.length, held, case.dim), jnp.bfloat16) for seed, held in enumerate(heads)]


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    options = ONE_COLLECTIVE if jax.default_backend() == "gpu" else None
    program = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    return program
