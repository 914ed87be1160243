"""What the compiled program does: how often it rotates, that kernels run beside, and that memory falls with the ring."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from hlo import Program, computations, gathers, kernels, runs, without_a_kernel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import BwdParams, FwdParams, RingAttentionConfig
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec

SEQUENCE, HEADS, DIM = 4096, 2, 32
CONFIG = RingAttentionConfig(FwdParams(64, 64), BwdParams(64, 64))


@cache
def compiled(size: int, backward: bool, **options):
    return lowered(size, backward, **options).compile()


def lowered(size: int, backward: bool, dtype=jnp.float32, **options):
    """The forward or the backward alone, over ``size`` devices."""
    mesh = jax.make_mesh((size,), ("ring",), devices=jax.devices()[:size], axis_types=(jax.sharding.AxisType.Auto,))
    place = Placement("ring", size)

    def local(*arrays):
        spec, operands = make_spec(Options(cfg=CONFIG, **options), Operands(*arrays[:3]), place)
        if not backward:
            return spec.strategy.forward(spec, operands)[0]
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3]

    rows = P(None, "ring")
    shard = jax.ShapeDtypeStruct((1, SEQUENCE, HEADS, DIM), dtype, sharding=NamedSharding(mesh, rows))
    lse = jax.ShapeDtypeStruct((1, HEADS, SEQUENCE), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "ring")))
    arrays = [shard] * 3 + ([shard, lse, shard] if backward else [])
    specs = tuple(array.sharding.spec for array in arrays)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return jax.jit(function).lower(*arrays)


def rotations(program: Program) -> int:
    """How often a run of the program rotates, loops counted."""
    return sum(times for _, times, ops in runs(program) for op in ops if op.is_rotation)


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_forward_rotates_once_less_than_there_are_ranks(size):
    program = computations(compiled(size, backward=False).as_text())
    assert rotations(program) == size - 1
    assert gathers(program) == []


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_backward_rotates_kv_n_minus_1_and_gradients_n_times(size):
    """K/V share a buffer with dK/dV wherever both travel: 1 alone, N-2 together, 1 of dK/dV alone, and 1 home."""
    program = computations(compiled(size, backward=True).as_text())
    assert rotations(program) == 1 + (size - 2) + 1 + 1
    assert gathers(program) == []


def test_gradients_travel_in_float32_and_go_home_rounded():
    """Nothing is added to them at home, and nothing hides that trip. Sent packed, in words of 16 bits."""
    text = lowered(4, backward=True, dtype=jnp.bfloat16).as_text()
    sent = re.findall(r"stablehlo\.collective_permute.*-> tensor<(\d+)xui16>", text)
    keys = 2 * SEQUENCE // 4 * HEADS * DIM
    assert sorted(map(int, sent)) == [keys, keys, 2 * keys, 3 * keys]


@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_runs_beside_every_rotation(backward):
    """But for the last one of the backward, which brings dK/dV home: nothing is left to compute.

    What counts is which instruction takes whose result, not the order in which XLA lists them: on a CPU it starts what has its
    operands. (Of the first kernel and the first rotation, which take nothing of each other, JAX 0.10 lists the rotation first
    and JAX 0.11, in the backward, the kernel; in a trace of either the rotation starts first.) On a GPU the
    listed order is the schedule: test_gpu_program.py.
    """
    program = computations(compiled(8, backward).as_text())
    last = [op.name for op in program["ENTRY"] if op.is_rotation][-1]
    assert without_a_kernel(program) == ([f"ENTRY: {last}"] if backward else [])


@pytest.mark.parametrize("backward", [False, True])
def test_rotations_do_not_run_ahead_of_kernels(backward):
    """All steps but the first and the last are one loop, which rotates once and computes once: whatever is started first, no
    second rotation can start before the loop's kernel is done. So the program does not grow with the ring either."""
    program = computations(compiled(8, backward).as_text())
    (_, _, entry), (_, times, loop) = runs(program)
    assert times == 6
    assert [len([op for op in ops if op.is_rotation]) for ops in (entry, loop)] == [3 if backward else 1, 1]
    assert [len(kernels(program, ops)) for ops in (entry, loop)] == [2, 1]


def test_a_window_leaves_out_the_shards_that_no_rank_sees():
    program = computations(compiled(8, backward=False, causal=True, sliding_window=SEQUENCE // 8).as_text())
    assert rotations(program) == 1
    program = computations(compiled(8, backward=False, sliding_window=10).as_text())
    assert rotations(program) == 2  # one shard back, and around to one shard ahead


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
