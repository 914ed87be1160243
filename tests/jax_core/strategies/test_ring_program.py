"""What the compiled program does: how often it rotates, that kernels stand between, and that memory falls with the ring."""

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import BwdParams, FwdParams, RingAttentionConfig
from jax_core.request.options import Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import Operands

SEQUENCE, HEADS, DIM = 4096, 2, 32
CONFIG = RingAttentionConfig(FwdParams(64, 64), BwdParams(64, 64))


class Op(NamedTuple):
    """An instruction of a computation that matters here: its kind, its name, its text."""

    kind: str
    name: str
    text: str


@cache
def compiled(size: int, backward: bool, **options):
    """The forward or the backward alone, over ``size`` devices."""
    mesh = jax.make_mesh((size,), ("ring",), devices=jax.devices()[:size], axis_types=(jax.sharding.AxisType.Auto,))
    place = Placement("ring", size)

    def local(*arrays):
        spec, operands = make_spec(Options(cfg=CONFIG, **options), Operands(*arrays[:3]), place)
        if not backward:
            return spec.strategy.forward(spec, operands)[0]
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3]

    rows = P(None, "ring")
    shard = jax.ShapeDtypeStruct((1, SEQUENCE, HEADS, DIM), jnp.float32, sharding=NamedSharding(mesh, rows))
    lse = jax.ShapeDtypeStruct((1, HEADS, SEQUENCE), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "ring")))
    arrays = [shard] * 3 + ([shard, lse, shard] if backward else [])
    specs = tuple(array.sharding.spec for array in arrays)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return jax.jit(function).lower(*arrays).compile()


def computations(program: str) -> dict[str, list[Op]]:
    """The program's computations in the order of their schedule, with the instructions that move or compute."""
    found: dict[str, list[Op]] = {}
    for line in program.splitlines():
        head = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
        if head:
            name = "ENTRY" if head[1] else head[2]
            found[name] = []
        op = re.match(r"\s+(?:ROOT )?%(\S+) = .*? (collective-permute|collective-permute-start|while|all-gather)\(", line)
        if op:
            found[name].append(Op(op[2], op[1], line))
    return found


def times(program: dict[str, list[Op]], kind: str, name: str = "ENTRY") -> int:
    """How often a run of the computation executes instructions of a kind, loops counted."""
    total = 0
    for op in program[name]:
        total += op.kind == kind
        if op.kind == "while":
            body = re.search(r"body=%(\S+?)[,\s]", op.text)[1]
            inside = times(program, kind, body)
            if inside:
                total += inside * int(re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.text)[1])
    return total


def rotation_order(program: dict[str, list[Op]], name: str = "ENTRY") -> list[str]:
    """ "rotate" and "compute" in the order in which they run; a loop that rotates is shown by two rounds."""
    order = []
    for op in program[name]:
        if op.kind == "collective-permute":
            order.append("rotate")
        if op.kind == "while":
            body = re.search(r"body=%(\S+?)[,\s]", op.text)[1]
            order += 2 * rotation_order(program, body) if times(program, "collective-permute", body) else ["compute"]
    return order


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_forward_rotates_once_less_than_there_are_ranks(size):
    program = computations(compiled(size, backward=False).as_text())
    assert times(program, "collective-permute") == size - 1
    assert times(program, "all-gather") == 0


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_backward_rotates_kv_n_minus_1_and_gradients_n_times(size):
    """K/V share a buffer with dK/dV wherever both travel: 1 alone, N-2 together, 1 of dK/dV alone, and 1 home."""
    program = computations(compiled(size, backward=True).as_text())
    assert times(program, "collective-permute") == 1 + (size - 2) + 1 + 1
    assert times(program, "all-gather") == 0


@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_stands_between_rotations(backward):
    """What a rotation brings is used by the kernel after next: one kernel runs while it travels, and no two rotations follow each
    other, but for the last one, which brings dK/dV home."""
    order = rotation_order(computations(compiled(8, backward).as_text()))
    assert "rotate" in order and "compute" in order
    assert all(pair != ("rotate", "rotate") for pair in pairwise(order)), order


def test_a_window_leaves_out_the_shards_that_no_rank_sees():
    program = computations(compiled(8, backward=False, causal=True, sliding_window=SEQUENCE // 8).as_text())
    assert times(program, "collective-permute") == 1
    program = computations(compiled(8, backward=False, sliding_window=10).as_text())
    assert times(program, "collective-permute") == 2  # one shard back, and around to one shard ahead


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_per_device_falls_as_the_ring_grows(backward):
    used = {size: compiled(size, backward).memory_analysis().temp_size_in_bytes for size in (2, 4, 8)}
    assert used[4] < used[2], used  # a ring of two has no loop to buffer for, so the first step is smaller
    assert used[8] < 0.55 * used[4], used


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_no_more_than_two_travelling_shards_are_held(size):
    """Buffers of the size of a packed K/V shard: the one in use, the one arriving, and nothing that grows with the ring."""
    program = compiled(size, backward=False).as_text()
    words = 2 * SEQUENCE // size * HEADS * DIM
    entry = program[program.index("ENTRY") :]
    held = set(re.findall(rf"%(\S+) = u32\[{words}\]\S* (?!get-tuple-element|bitcast)", entry))
    assert 1 <= len(held) <= 2, held
