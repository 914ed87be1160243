"""Does the rotation hide behind the kernels? A pass beside the same pass in which nothing travels.

In JAX alone, so that no host work of the bridge stands between. Without rotation every step works on what the rank has already: the
same kernels on the same shapes, another result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch.distributed as dist
from jax.sharding import PartitionSpec

from jax_core.request.options import Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.ring import loop as core
from report import short
from timing import Timed, Times, take_turns
from torch_bridge import mesh as bridge
from torch_bridge.compiled import ONE_ROTATION

if TYPE_CHECKING:
    from ring import Run

LIMITS = {8192: 1.10, 32768: 1.05}  # tokens a GPU, and how much longer the pass may take
ROTATING, STILL = "rotating", "nothing travels"


def overlap(run: "Run") -> None:
    for length in run.options.overlap_lengths:
        if not run.may_begin(f"overlap at {length} tokens a GPU"):
            return
        arrays = local_arrays(run, length)
        timed: dict[str, dict[str, Timed]] = {"forward": {}, "backward": {}}
        for name in (ROTATING, STILL):
            forward, backward = programs(run, arrays, moving=name == ROTATING)
            q, k, v, dout = arrays
            out, lse = jax.block_until_ready(forward(q, k, v))
            timed["forward"][name] = call(forward, q, k, v)
            timed["backward"][name] = call(backward, q, k, v, out, lse, dout)
        for phase, systems in timed.items():
            for one in systems.values():
                jax.block_until_ready(one.call())  # compiled
            times, _ = take_turns(systems, run.options.rounds or 10, run.options.sample_ms, run.team)
            add(run, length, phase, times)


def call(function: Any, *arrays: Any) -> Timed:
    return Timed(lambda: function(*arrays), jax.block_until_ready)


def add(run: "Run", length: int, phase: str, times: dict[str, Times]) -> None:
    case = f"overlap at {short(length)} tokens a GPU"
    slowest = {name: run.team.slowest(taken.median) for name, taken in times.items()}
    for name, taken in times.items():
        run.report.add(case=case, system=name, phase=phase, **taken.figures() | {"ms": slowest[name]})
    longer = slowest[ROTATING] / slowest[STILL] if len(slowest) == 2 else None
    run.report.ratio(f"{case}, {phase}: rotating / nothing travels", longer, at_most=LIMITS.get(length, 1.05))


def local_arrays(run: "Run", length: int) -> list[jax.Array]:
    """q, k, v and the output's gradient, standard normal, as global arrays of the ring."""
    heads, kv_heads, dim = run.options.heads
    keys = jax.random.split(jax.random.key(run.team.rank), 4)
    shapes = [(1, length, held, dim) for held in (heads, kv_heads, kv_heads, heads)]
    device = bridge.jax_mesh(ring()).local_devices[0]
    made = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    return [bridge.to_global(ring(), jax.device_put(array, device)) for array in made]


def ring() -> bridge.Ring:
    return bridge.resolve(dist.group.WORLD)


def programs(run: "Run", arrays: list[jax.Array], moving: bool) -> tuple[Any, Any]:
    """The forward and the backward of local shards, jitted over the ring; traced at their first call."""
    size = run.team.size
    shapes: list[Any] = [jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype) for array in arrays[:3]]
    shards = core.Operands(*shapes)
    options = Options(causal=True, layout="zigzag", platform=run.options.platform)
    spec, _ = make_spec(options, shards, Placement(bridge.AXIS if size > 1 else None, size))

    def forward(q, k, v):
        with rotation(moving):
            return spec.strategy.forward(spec, core.Operands(q, k, v))

    def backward(q, k, v, out, lse, dout):
        with rotation(moving):
            found = spec.strategy.backward(spec, core.Operands(q, k, v), out, lse, dout)
        return found.query, found.key, found.value

    return on_ring(forward), on_ring(backward)


def on_ring(function: Any) -> Any:
    rows = PartitionSpec(bridge.AXIS)
    mapped = jax.shard_map(function, mesh=bridge.jax_mesh(ring()), in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(mapped, compiler_options=ONE_ROTATION if jax.default_backend() == "gpu" else None)


@contextmanager
def rotation(moving: bool) -> Iterator[None]:
    """While a pass is traced: as it is, or with every buffer staying where it is."""
    if moving:
        yield
        return
    module: Any = core
    kept = module.start_transfers, module.finish_transfers
    module.start_transfers = lambda transfers, axis_name, size: [transfer.buffer for transfer in transfers]
    module.finish_transfers = lambda buffers, transfers: list(buffers)
    try:
        yield
    finally:
        module.start_transfers, module.finish_transfers = kept
