"""The ring compiled for TPUs ahead of time, without a TPU: time to compile, memory, counted work. A markdown table.

PYTHONPATH=<folder of libtpu> python -m benchmarks.tpu.compile [--platform pallas] [--topologies v5e:2x4 ...] [--dims 64 128 256]

Nothing is run. ``tests/jax_core/strategies/test_tpu_program.py`` compiles with the same function and inspects the schedule.
"""

import argparse
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the TPU is described, not detected
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask the cloud's metadata server for a TPU
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # and no TPU needs to be locked for one process

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec

TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")  # eight devices each: a chip of the last has two
DIMS = (64, 128, 256)
PASSES = ("forward", "backward")
MIB = 2**20


@dataclass(frozen=True)
class Request:
    """One causal pass over a ring: bfloat16, batch 1, ``tokens`` per device. ``platform``: that of the kernel, or "fused"."""

    topology: str
    dim: int
    direction: str
    platform: str
    tokens: int = 8192
    size: int = 8
    heads: int = 32
    kv_heads: int = 8
    layout: str = "zigzag"


class Compiled(NamedTuple):
    """The scheduled program, bytes held per device, the largest VMEM use of a kernel, flops by the compiler's count (loop bodies
    once), and CPU seconds to compile."""

    text: str
    arguments: int
    outputs: int
    temporaries: int
    vmem: int
    flops: float
    seconds: float


@cache
def compile_ring(request: Request) -> Compiled:
    mesh = Mesh(np.array(devices(request.topology)[: request.size]), ("ring",))
    arrays = operands(request, mesh)
    specs = tuple(array.sharding.spec for array in arrays)
    mapped = jax.shard_map(local_pass(request), mesh=mesh, in_specs=specs, out_specs=P(None, "ring"))
    lowered = jax.jit(mapped).trace(*arrays).lower(lowering_platforms=("tpu",))
    started = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return Compiled(text, *sizes, largest_vmem(text), compiled.cost_analysis().get("flops", 0.0), seconds)


@cache
def devices(topology: str) -> list[Any]:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def local_pass(request: Request):
    """The forward or the backward alone, of local shards."""
    fused = request.platform == "fused"
    how: dict[str, Any] = dict(strategy="fused") if fused else dict(platform=request.platform, strategy="ring")
    options = Options(**how, layout=request.layout, causal=True, lse_gradient=False)
    # The devices are TPUs, whatever this process runs on; this decides how shards are sent and which kernel is chosen.
    place = Placement("ring", request.size, backend="tpu")

    def local(*arrays):
        spec, operands = make_spec(options, Operands(*arrays[:3]), place)
        if request.direction == "forward":
            return spec.strategy.forward(spec, operands)[0]
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3]

    return local


def operands(request: Request, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """q, k, v; for the backward also out, lse, dout."""
    length = request.size * request.tokens

    def rows(heads: int) -> jax.ShapeDtypeStruct:
        shape = (1, length, heads, request.dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "ring")))

    lse_sharding = NamedSharding(mesh, P(None, None, "ring"))
    lse = jax.ShapeDtypeStruct((1, request.heads, length), jnp.float32, sharding=lse_sharding)
    query, key = rows(request.heads), rows(request.kv_heads)
    return [query, key, key] + ([query, lse, query] if request.direction == "backward" else [])


def largest_vmem(text: str) -> int:
    """The VMEM of the Pallas kernels' own blocks and scratch, without what XLA keeps there; 0 if there is no such kernel."""
    kernels = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    sizes = [re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"', line) for line in kernels]
    return max((int(size) for found in sizes for size in found), default=0)


def table(requests: Iterable[Request]) -> Iterable[str]:
    sizes = "arguments MiB | outputs MiB | temporaries MiB | a kernel's VMEM MiB"
    yield f"| topology | dim | pass | compile, CPU s | {sizes} | TFLOP counted |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for request in requests:
        yield row(request, compile_ring(request))


def row(request: Request, compiled: Compiled) -> str:
    sizes = " | ".join(f"{size / MIB:.0f}" for size in (compiled.arguments, compiled.outputs, compiled.temporaries))
    vmem = f"{compiled.vmem / MIB:.1f}" if compiled.vmem else "-"
    head = f"{request.topology} | {request.dim} | {request.direction} | {compiled.seconds:.1f}"
    return f"| {head} | {sizes} | {vmem} | {compiled.flops / 1e12:.2f} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="pallas", help="of the kernel, or fused")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--dims", nargs="+", type=int, default=DIMS)
    parser.add_argument("--tokens", type=int, default=Request.tokens, help="on each device")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    cases = product(given.topologies, given.dims, PASSES)
    for line in table(Request(*case, given.platform, given.tokens) for case in cases):
        print(line, flush=True)


if __name__ == "__main__":
    main()
