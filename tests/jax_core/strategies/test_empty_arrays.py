"""No program on a mesh reads an operand of no elements, nor makes one of a constant: jaxlib 0.11.2 crashes while it compiles that.

Most tests read the program as it is lowered, which says it on every version. One compiles what has crashed, in a process of its
own: as a program, this file does that.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import operands_without_elements
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_core import ring_attention
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec

HEADS, DIM = 4, 8
SIZES = {"batch": (0, 4, 4), "queries": (2, 0, 4), "keys": (2, 6, 0), "sequence": (2, 0, 0)}  # of shards
EMPTY = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def mesh(*sizes: int) -> Mesh:
    """With axes "a", "b", ..."""
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple("ab"[: len(sizes)]))


def users_program(sizes: tuple[int, int, int], remat: str, layout: str = "striped", axes: tuple[int, ...] = (4, 1), **options):
    """Results and gradients where a user's own ``shard_map`` has a bias and sinks, lowered."""
    where, (batch, queries, keys) = mesh(*axes), sizes
    ring, size = where.axis_names, where.size
    qkv = [jnp.ones((batch, length * size, HEADS, DIM)) for length in (queries, keys, keys)]
    more = [jnp.ones(HEADS), jnp.ones((1, HEADS, queries * size, keys * size))]
    rows = P(None, ring)
    attend: Callable = partial(ring_attention, axis_name=ring, layout=layout, return_lse=True, **options)
    attend = jax.checkpoint(attend) if remat == "inside" else attend
    specs = dict(in_specs=(rows, rows, rows, P(), P(None, None, ring)), out_specs=(rows, P(None, None, ring)))
    mapped = jax.shard_map(attend, mesh=where, **specs)
    mapped = jax.checkpoint(mapped) if remat == "outside" else mapped

    def both(*operands):
        results, transpose = jax.vjp(lambda *x: jax.tree.map(jnp.sin, mapped(*x)), *operands)
        return results, transpose(jax.tree.map(jnp.cos, results))

    return jax.jit(both).lower(*qkv, *more)


@EMPTY
@pytest.mark.parametrize("remat", ["no", "inside", "outside"])
def test_operands_of_a_users_shard_map(sizes: tuple[int, int, int], remat: str):
    assert operands_without_elements(users_program(sizes, remat, chunk_size=7).as_text()) == []


def ring_program(strategy: str, layout: str, shard: int, backward: bool, axes: tuple[int, ...] = (4,), **mask):
    """A pass as torch calls it, lowered: each rank's own arrays lie behind one another. As on a GPU, but with XLA's kernel."""
    where = mesh(*axes)
    ring = where.axis_names if len(axes) > 1 else where.axis_names[0]
    place, lse_gradient = Placement(ring, where.size, sizes=axes, backend="gpu"), False
    options = Options(platform="xla", strategy=strategy, layout=layout, lse_gradient=lse_gradient, **mask)

    def local(*arrays):
        spec, operands = make_spec(options, Operands(*arrays[:3]), place)
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3] if backward else spec.strategy.forward(spec, operands)

    query = jax.ShapeDtypeStruct((where.size, shard, HEADS, DIM), jnp.float32)
    lse = jax.ShapeDtypeStruct((where.size, HEADS, shard), jnp.float32)
    rows = P(ring)
    mapped = jax.shard_map(local, mesh=where, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(mapped).lower(*[query] * 3, *[query, lse, query] * backward)


MASKS = {
    "206 back": {"causal": True, "sliding_window": (206, 0)},
    "a run back": {"causal": True, "sliding_window": (256, 0)},
    "a run on both sides": {"sliding_window": (256, 256)},
    "a few": {"sliding_window": (3, 1)},
    "on the diagonal": {"sliding_window": (0, 0)},
    "ahead": {"sliding_window": (0, 200)},
    "chunks": {"chunk_size": 256},
}
STRATEGIES = {"all_gather": (4,), "ring": (4,), "ulysses": (4,), "hierarchical": (2, 2), "ulysses_ring": (2, 2)}
BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@BOTH
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("shard", [64, 256, 512])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_neighbours(mask: dict, shard: int, layout: str, backward: bool):
    """Of their keys, as many as a run has, or none on one side."""
    assert operands_without_elements(ring_program("all_gather", layout, shard, backward, (2,), **mask).as_text()) == []


@BOTH
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, layout: str, backward: bool):
    program = ring_program(strategy, layout, 256, backward, STRATEGIES[strategy], **MASKS["206 back"])
    assert operands_without_elements(program.as_text()) == []


def crashed():
    """The programs that have."""
    yield users_program((2, 5, 0), "no", chunk_size=7)
    yield users_program((0, 4, 4), "outside", "contiguous", (2, 4), strategy="ulysses_ring", causal=True)
    yield ring_program("all_gather", "zigzag", 512, True, (2,), **MASKS["206 back"])


def test_what_has_crashed_compiles():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"


if __name__ == "__main__":
    for program in crashed():
        program.compile()
