"""The ring as the TPU compiler schedules it, compiled ahead of time on a machine that has no TPU.

Nothing is run and no time is measured. What the schedule shows: that a kernel runs while K/V rotate, that nothing is gathered, and
how much memory a device holds. Needs libtpu; `make test-tpu` brings it.
"""

import re

import jax
import numpy as np
import pytest
from effort import ALL, of_the_day
from hlo import Op, Program, beside, computations, gathers, runs
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_core
from benchmarks.tpu.compile import DIMS, PASSES, TOPOLOGIES, Request, compile_ring, devices, operands

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: make test-tpu")

SIZE = 8
# The XLA kernel on one generation: its programs are slow to compile. On TPU7x the SparseCores re-lay its shards, and no rotation is
# begun before the kernel any more (docs/contributing/tpu.md). On few cores one generation of the four is tried, by the day.
TRIED = [topology for number, topology in enumerate(TOPOLOGIES) if ALL or number == of_the_day("topologies", 4)]
CASES = [("pallas", topology) for topology in TRIED] + [("xla", "v5e:2x4")]
CASE = pytest.mark.parametrize(("platform", "topology"), CASES)
FUSED = [("fused", topology) for topology in TRIED]
CASE_OR_FUSED = pytest.mark.parametrize(("platform", "topology"), CASES + FUSED)
PASS = pytest.mark.parametrize("direction", PASSES)
TWICE = {"v5e:2x4": "v5e:4x4", "v5p:2x2x2": "v5p:2x2x4", "v6e:2x4": "v6e:4x4", "tpu7x:2x2x1": "tpu7x:2x2x2"}


def computes(program: Program, op: Op) -> bool:
    """Whether it is attention: a Pallas kernel, or in plain XLA a loop over blocks that multiplies matrices."""
    if op.kind in ("convolution", "dot") or 'custom_call_target="tpu_custom_call"' in op.text:
        return True
    words = re.findall(r"(?:body|calls|computations?)=(\{.*?\}|%[^\s,]+)", op.text)
    names = [name for word in words for name in re.findall(r"%([^\s,}]+)", word)]
    return any(computes(program, inner) for name in names for inner in program[name])


def rotations(program: Program) -> list[tuple[int, bool, str]]:
    """How often each runs, whether a kernel runs meanwhile, its text."""
    return [
        (times, any(computes(program, other) for other in beside(ops, i)), f"{name}: {op.text.strip()[:150]}")
        for name, times, ops in runs(program)
        for i, op in enumerate(ops)
        if op.is_rotation
    ]


@CASE
@PASS
@pytest.mark.parametrize("dim", [pytest.param(dim, marks=[pytest.mark.slow] * (dim != 128)) for dim in DIMS])
def test_a_kernel_runs_while_kv_rotate(platform, topology, direction, dim):
    """K and V rotate beside every kernel but the last, dK and dV beside every one but the first; then those two return to their
    owners, when nothing is left to compute. No collective but these."""
    program = computations(compile_ring(Request(topology, dim, direction, platform)).text)
    found = rotations(program)
    assert gathers(program) == []
    assert sum(times for times, _, _ in found) == (2 * (SIZE - 1) if direction == "forward" else 2 * (2 * SIZE - 1))
    alone = [text for _, overlaps, text in found if not overlaps]
    returned = [text for _, _, text in found if text.startswith("ENTRY")][-2:]
    assert alone == ([] if direction == "forward" else returned)


def temporaries(topology: str, direction: str, platform: str, size: int, tokens: int) -> int:
    return compile_ring(Request(topology, 128, direction, platform, tokens, size)).temporaries


@CASE_OR_FUSED
@PASS
def test_memory_is_that_of_the_shard(platform, topology, direction):
    """With twice the devices for twice the tokens a device holds no more: of one sequence it holds 1/N. From 8 devices on the ring
    is a loop, whose length is all that differs."""
    eight = temporaries(topology, direction, platform, 8, 8192)
    sixteen = temporaries(TWICE[topology], direction, platform, 16, 8192)
    assert sixteen <= 1.01 * eight


# A loop holds the buffers of two steps, a ring of two, which has none, those of one: a quarter of the shard, twice over, and a
# tenth for what is not an array of the shard. The XLA kernel re-lays its shards into blocks besides, which a loop holds longer.
OF_TWO = {"xla": 0.75}


@CASE_OR_FUSED
@PASS
def test_memory_falls_as_the_ring_grows(platform, topology, direction):
    """64k tokens in all."""
    used = {size: temporaries(topology, direction, platform, size, 65536 // size) for size in (2, 4, 8)}
    assert used[4] < used[2], used
    assert used[8] <= OF_TWO.get(platform, 0.55) * used[2], used


def test_the_devices_of_the_mesh_count_not_this_process():
    """Inside a ``shard_map`` over TPUs, K and V are sent unpacked, as TPUs want them, though this process has a CPU."""
    request = Request("v5e:2x4", 128, "forward", "xla")
    mesh = Mesh(np.array(devices(request.topology)), ("ring",))

    def local(*arrays):
        return jax_core.ring_attention(*arrays, axis_name="ring", platform="xla")

    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring")))
    program = function.trace(*operands(request, mesh)).lower(lowering_platforms=("tpu",)).as_text()
    assert set(re.findall(r"collective_permute.*?-> tensor<(?:\d+x)+(\w+)>", program)) == {"bf16"}


# Options, dtype, head and value dim, and what comes beside query, key and value.
FEATURES: dict[str, tuple[dict, str, tuple[int, int], dict]] = {
    "segments, slopes, dropout, soft cap, mask function": (
        dict(logits_soft_cap=30.0, dropout_prob=0.1, mask_mod=lambda b, h, q, k: (q // 64 + k // 64) % 3 != h % 3),
        "bfloat16",
        (128, 128),
        dict(q_segment_ids="ids", alibi_slopes="slopes", dropout_seed="seed"),
    ),
    "bias, mask, positions": (dict(chunk_size=300), "float32", (80, 80), dict(bias="bias", mask="mask", q_position_ids="ids")),
    "fused backward": (
        dict(fused_backward=True, sliding_window=(200, 10)), "bfloat16", (192, 128), dict(alibi_slopes="slopes", bias="row bias")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_compiles(name: str):
    """Of the Pallas kernels, forward and backward, in lengths that no block divides."""
    options, dtype, (dim, value_dim), beside = FEATURES[name]
    mesh, length = Mesh(np.array(devices("v5e:2x4")[:2]), ("ring",)), 2 * 700
    rows, columns = P(None, "ring"), P(None, None, "ring")
    kinds = {
        "ids": ((2, length), "int32", rows),
        "slopes": ((4,), "float32", P()),
        "seed": ((2,), "uint32", P()),
        "bias": ((1, 4, length, length), dtype, columns),
        "row bias": ((2, 1, 1, length), dtype, P()),
        "mask": ((2, 1, length, length), "bool", columns),
    }
    shapes = {
        "query": ((2, length, 4, dim), dtype, rows),
        "key": ((2, length, 2, dim), dtype, rows),
        "value": ((2, length, 2, value_dim), dtype, rows),
    }
    shapes |= {operand: kinds[kind] for operand, kind in beside.items()}
    specs = {operand: spec for operand, (_, _, spec) in shapes.items()}
    wanted = [operand for operand in shapes if operand in ("query", "key", "value", "bias", "alibi_slopes")]

    def local(arrays):
        def attention(parameters):
            return jax_core.ring_attention(
                **{**arrays, **parameters}, **options, axis_name="ring", platform="pallas", layout="zigzag"
            ).sum()

        return jax.grad(attention)({operand: arrays[operand] for operand in wanted})

    out_specs = {operand: specs[operand] for operand in wanted}
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs))
    structs = {
        operand: jax.ShapeDtypeStruct(shape, kind, sharding=jax.NamedSharding(mesh, spec))
        for operand, (shape, kind, spec) in shapes.items()
    }
    text = function.trace(structs).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 4


@pytest.mark.parametrize("fused", [False, True])
def test_entries_under_vmap_lower(fused: bool):
    mesh = Mesh(np.array(devices("v5e:2x4")[:2]), ("ring",))
    rows = P(None, None, "ring")

    def local(query, slopes):
        def total(query, slopes):
            settings = dict(causal=True, axis_name="ring", platform="pallas", fused_backward=fused)
            return jax_core.ring_attention(query, query, query, alibi_slopes=slopes, **settings).sum()

        return jax.vmap(jax.grad(total))(query, slopes)

    arrays = [((3, 1, 512, 2, 128), rows), ((3, 2), P())]
    structs = [jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec)) for shape, spec in arrays]
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False))
    assert "tpu_custom_call" in function.trace(*structs).lower(lowering_platforms=("tpu",)).as_text()
