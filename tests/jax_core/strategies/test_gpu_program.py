"""The ring as XLA schedules it for eight GPUs, compiled ahead of time on a machine that has none.

No time is measured here. What the schedule shows: that a kernel runs while a rotation travels, what is copied besides, and how much
memory a rank holds. Needs XLA's compiler for GPUs; `make test-gpu-aot` brings it.
"""

import atexit
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from effort import ALL, of_the_day
from hlo import Op, Program, beside, computations, gathers, operands_without_elements, runs
from in_place import equal_in_program
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core.kernels.cudnn import calls
from jax_core.kernels.cute import calls as cute_calls
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec
from torch_bridge.start.xla_options import options_of_ring

pytest.importorskip("jax_cuda13_plugin", reason="XLA's compiler for GPUs is not installed: make test-gpu-aot")
triton = import_module("triton")  # where that is installed, its absence is a fault
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted: unset TRITON_INTERPRET"),
    pytest.mark.slow,
]

SIZE, SHARD, HEADS, KV_HEADS, DIM = 8, 4096, 32, 8, 128
KV_BYTES = 2 * SHARD * KV_HEADS * DIM * 2
BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
PLATFORMS = pytest.mark.parametrize("platform", ["triton", "cuda", "cute"])
LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "zigzag"])


@cache
def compiled(*request, hosts: int = 1, **more):
    """:func:`lowered`, compiled for the GPUs."""
    return lowered(*request, hosts=hosts, **more).compile(compiler_options=settings(hosts))


def settings(hosts: int) -> dict[str, Any]:
    """Of XLA's compiler."""
    return {"xla_gpu_cuda_data_dir": toolkit(), **options_of_ring(2 if hosts > 1 else 1)}


def lowered(
    backward: bool,
    layout: str = "zigzag",
    size: int = SIZE,
    platform: str = "triton",
    tokens: int = SHARD,
    hosts: int = 1,
    strategy: str = "auto",
    window: tuple[int, int] | None = None,
    causal: bool = True,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    deterministic: bool = False,
    documents: int = 0,
):
    """The forward or the backward alone, for ``size`` GPUs of ``tokens`` tokens each. ``hosts``: more than one makes it a mesh of
    two axes, and "auto" the hierarchical ring. ``heads``: of queries and of keys. ``documents``: how many a row may have."""
    if platform == "triton":
        pytest.importorskip("jax_triton", reason="it calls Triton's kernels and is not installed: make test-gpu-aot")
    if platform == "cute" and cute_calls.changed():
        pytest.skip(f"{cute_calls.changed()}: make test-gpu-aot")
    sizes, axes = ((hosts, size // hosts), ("host", "gpu")) if hosts > 1 else ((size,), "ring")
    mesh, place = topologies.make_mesh(gpus(size), sizes, axes if hosts > 1 else (axes,)), on_gpus(axes, size, sizes)
    strategy = "hierarchical" if hosts > 1 and strategy == "auto" else strategy
    asked = dict(platform=platform, strategy=strategy, layout=layout, sliding_window=window, causal=causal)
    options = Options(lse_gradient=False, deterministic=deterministic, **asked)

    def local(*arrays):
        *arrays, bounds = arrays if documents else (*arrays, None)
        operands = Operands(*arrays[:3], documents=bounds)
        spec, operands = make_spec(options, operands, place)
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3] if backward else spec.strategy.forward(spec, operands)[0]

    rows, lse_rows = P(None, axes), P(None, None, axes)
    query, key = (shard((1, size * tokens, number, DIM), jnp.bfloat16, mesh, rows) for number in heads)
    lse = shard((1, heads[0], size * tokens), jnp.float32, mesh, lse_rows)
    arrays = [query, key, key] + ([query, lse, query] if backward else [])
    if documents:
        arrays.append(shard((1, documents + 1), jnp.int32, mesh, P()))
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tuple(array.sharding.spec for array in arrays), out_specs=rows))
    with with_cudnn():
        return function.trace(*arrays).lower(lowering_platforms=("cuda",))


ARCHITECTURE = os.environ.get("CUTE_DSL_ARCH", "sm_90a")


def on_gpus(axes: Any, size: int, sizes: tuple[int, ...] = ()) -> Placement:
    """Of Hopper's generation, or the one of ``CUTE_DSL_ARCH``."""
    return Placement(axes, size, sizes=sizes, backend="gpu", capability=int(re.sub(r"\D", "", ARCHITECTURE)))


@contextmanager
def with_cudnn() -> Iterator[None]:
    """Answers for the cuDNN of a GPU's machine, which JAX calls and which is not here."""
    with (
        patch.object(calls, "version", lambda: 91900),
        patch.object(calls.cudnn_attention(), "check_cudnn_version", lambda: 91900),
        patch.dict(os.environ, CUTE_DSL_ARCH=ARCHITECTURE),
    ):
        yield


def shard(shape, dtype, mesh, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@cache
def gpus(size: int):
    target = (Path(__file__).parents[2] / "support" / "data" / "gpu_target.textproto").read_text()
    return topologies.get_topology_desc(platform="cuda", topology_name="h100", target_config=target, topology=f"1x1x{size}")


@cache
def toolkit() -> str:
    """A folder laid out like CUDA's, with the two files of it that XLA compiles with: Triton brings its own."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-of-triton-"))
    atexit.register(shutil.rmtree, folder)
    libdevice = Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc"
    for name, file in (("bin/ptxas", triton.knobs.nvidia.ptxas_blackwell.path), ("nvvm/libdevice/libdevice.10.bc", libdevice)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(file)
    return str(folder)


def is_kernel(program: Program, op: Op) -> bool:
    """An attention kernel, alone or fused with the slices of a packet that it reads."""
    if op.kind == "fusion":
        return any(is_kernel(program, inner) for inner in program[op.called("calls")])
    return bool(re.search(r'custom_call_target="(triton_kernel_call|__cudnn\$fmha|CuteDSLRT)', op.text))


_PASSES = ("fusion", "copy", "concatenate", "slice", "convert", "transpose", "broadcast")


def written(program: Program, op: Op) -> float:
    """What a pass over memory besides kernels and rotations writes, in K/V shards."""
    if op.kind not in _PASSES or is_kernel(program, op):
        return 0
    arrays = re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", op.types)
    return sum(int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n) for bits, dims in arrays) / KV_BYTES


class Rotation(NamedTuple):
    times: int
    kernels: int  # launched while it travels
    text: str


def rotations(program: Program) -> list[Rotation]:
    return [
        Rotation(times, sum(is_kernel(program, other) for other in beside(ops, i)), f"{name}: {op.text.strip()}")
        for name, times, ops in runs(program)
        for i, op in enumerate(ops)
        if op.is_rotation
    ]


@BOTH
@LAYOUTS
@PLATFORMS
def test_number_of_rotations(backward, layout, platform):
    """Forward N - 1; backward the same with dK/dV in all but the first, then dK/dV alone twice, the second time home."""
    program = computations(compiled(backward, layout, platform=platform).as_text())
    assert sum(rotation.times for rotation in rotations(program)) == SIZE - 1 + 2 * backward
    assert gathers(program) == []


@BOTH
@LAYOUTS
@PLATFORMS
def test_a_kernel_runs_while_a_rotation_travels(backward, layout, platform):
    """But for the last one of the backward, which brings dK/dV home: nothing is left to compute."""
    program = computations(compiled(backward, layout, platform=platform).as_text())
    alone = [rotation for rotation in rotations(program) if rotation.kernels == 0]
    last = [rotation for rotation in rotations(program) if rotation.text.startswith("ENTRY")][-1]
    assert alone in ([], [last] if backward else [])


@BOTH
@pytest.mark.parametrize("hosts", [2, 4])
def test_transfers_between_hosts_travel_beside_a_kernel(backward, hosts):
    """So do those within a host that are under way with them; the last one of the backward brings dK/dV home."""
    program = computations(compiled(backward, hosts=hosts).as_text())
    every, ranks = rotations(program), SIZE // hosts
    between = [rotation for rotation in every if f"source_target_pairs={{{{0,{ranks}}}" in rotation.text]
    steps = ranks * (hosts - 1)
    # K/V leave in every host's steps but the last's, the sums arrive in every one's but the first's; both share what travels.
    assert sum(rotation.times for rotation in between) == (ranks * hosts if backward else steps)
    alone = [rotation for rotation in every if rotation.kernels == 0]
    assert alone == ([every[-1]] if backward else [])
    assert gathers(program) == []


@pytest.mark.parametrize(("backward", "shards"), [(False, 0), (True, 2)], ids=["forward", "backward"])
def test_what_a_step_writes_besides(backward, shards):
    """In the loop, in units of a K/V shard, for each rotation. Forward: nothing; a kernel reads what arrived where it lies, and
    changes the running output in place. Backward: the arrived dK/dV and the step's are added, in float32."""
    program = computations(compiled(backward).as_text())
    name, _, ops = list(runs(program))[1]
    passes = {op.name: written(program, op) for op in ops if written(program, op) > 0.01}
    assert sum(passes.values()) <= 1.01 * shards * sum(op.is_rotation for op in ops), (name, passes)


@pytest.mark.parametrize(("backward", "shards"), [(False, 2), (True, 4 + 3 * 2 + 4 * 2)], ids=["forward", "backward"])
def test_what_flash_attn_4_needs_besides(backward, shards):
    """On four GPUs, in units of a K/V shard. Forward: the four partial outputs are joined in one pass. Backward: dQ starts from
    zeros (4), and so do the float32 dK/dV of every step (2 each), to which those that arrive are added (2 each, but for the first).
    No copy."""
    program = computations(compiled(backward, size=4, platform="cute").as_text())
    passes = [(op, written(program, op)) for _, _, ops in runs(program) for op in ops if written(program, op) > 0.2]
    assert [op.text for op, _ in passes if op.kind == "copy"] == []
    assert sum(size for _, size in passes) <= 1.01 * shards, [(op.name, size) for op, size in passes]
    assert len(passes) == 1 or backward


@pytest.mark.parametrize("platform", ["triton", "cute"])
@pytest.mark.parametrize(("backward", "shards"), [(False, 6), (True, 10)], ids=["forward", "backward"])
def test_memory_does_not_grow_with_the_ring(backward, shards, platform):
    """In units of a K/V shard, besides operands and results. Forward: the running output (4), K/V in use and arriving (2).
    Backward: dQ (4), K/V in use and arriving (2), dK/dV that leave and arrive (4), where XLA finds room for the step's own.
    flash-attn-4's partial outputs are apart, two shards each: four of them on four GPUs, two beside the running output on eight."""
    used = {
        size: compiled(backward, size=size, platform=platform).memory_analysis().temp_size_in_bytes / KV_BYTES for size in (4, 8)
    }
    assert used[8] <= 1.01 * used[4] or (platform == "cute" and not backward), used
    assert used[8] <= 1.02 * (shards if platform == "triton" or backward else 10), used


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_of_cudnn(backward):
    """As above, for shards long enough that the backward computes a quarter of the heads at a time, and without cuDNN's own scratch
    memory, which only a GPU tells. Rings of an odd and an even number of steps in the loop, and with no loop at all, need the same.

    Forward: the running output, old and new (8), K/V in use and arriving (2), the step's result (2). Backward: dQ (4), K/V in use
    and arriving (2), dK/dV that leave and arrive (4); of a group of heads tiles (1.75) and results (0.75), of the others dK/dV
    (1.5); 2 of these find room in the final results. The XLA of jax 0.11 finds room for less of them, and not in every ring for as
    much."""
    sizes, roomy = (3, 4, 5, 8), backward and jax.version.__version_info__ >= (0, 11)
    programs = [compiled(backward, size=size, platform="cuda", tokens=2**14) for size in sizes]
    used = [program.memory_analysis().temp_size_in_bytes / (4 * KV_BYTES) for program in programs]
    assert max(used) <= 1.02 * (13 if roomy else 12), dict(zip(sizes, used, strict=True))
    assert max(used) <= (1.05 if roomy else 1.01) * min(used), dict(zip(sizes, used, strict=True))


# By strategy, the GPUs and the hosts. The windows: none, as long as a run or a block, shorter than any, on both sides.
SHORT = {"all_gather": (2, 1), "ring": (2, 1), "ulysses": (2, 1), "hierarchical": (4, 2), "ulysses_ring": (4, 2)}
WINDOWS = {"all": None, "206": (206, 0), "63": (63, 0), "512": (512, 0), "0": (0, 0), "both": (206, 100)}
TOKENS = (64, 100, 256, 512, 1000, 2048)
KERNELS = ("xla", "triton", "cute")
HAS_CRASHED = [("all_gather", "zigzag", 512, "206", platform, backward) for platform in KERNELS for backward in (0, 1)]


def short_shards() -> Iterator:
    """What has crashed jaxlib 0.11.2 while it compiled, and as much of everything like it as the day's share."""
    for case in product(SHORT, ("contiguous", "zigzag", "striped"), TOKENS, WINDOWS, KERNELS, (0, 1)):
        name = "-".join(map(str, case))
        if case in HAS_CRASHED or ALL or of_the_day(name, 600) == 0:
            yield pytest.param(*case, id=name)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize("size", [1, 4])
@BOTH
def test_documents_are_rectangles(backward, size, kv_heads):
    """flash-attn-4's programs compile for them, and nothing is sorted: there are no lists of blocks."""
    program = compiled(backward, size=size, platform="cute", heads=(HEADS, kv_heads), documents=16)
    text = program.as_text()
    assert "sort" not in text and text.count("CuteDSLRT_NvJaxCutlassCall_v2") >= size > 0


@pytest.mark.parametrize(("strategy", "layout", "tokens", "window", "platform", "backward"), list(short_shards()))
def test_short_shards(strategy, layout, tokens, window, platform, backward):
    """They compile, without operands of no elements (``test_empty_arrays.py`` reads more programs, of every kind)."""
    size, hosts = SHORT[strategy]
    request = dict(size=size, hosts=hosts, platform=platform, tokens=tokens, strategy=strategy, window=WINDOWS[window])
    try:
        program = lowered(bool(backward), layout, causal=window != "both", **request)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert operands_without_elements(program.as_text()) == []
    try:
        assert program.compile(compiler_options=settings(hosts))
    except jax.errors.JaxRuntimeError as error:
        if "Couldn't find output tile sizes" not in str(error) or jax.version.__version_info__ >= (0, 11):
            raise
        pytest.skip("a product of 200 x 800: 0.10 finds no tiles for it where no GPU is there to try others")


# By strategy, layout, heads, window and whether it is deterministic: what has hung two GPUs, with and without a window.
HAS_HUNG = [("cute", "all_gather", "zigzag", (4, 2), window, True) for window in ("all", "206")]


def backward_calls() -> Iterator:
    """All of what a backward can be made of, a share of it each day."""
    groups, windows = ((4, 2), (4, 4)), ("all", "206")
    for case in product(("cute", "triton", "cuda"), SHORT, ("contiguous", "zigzag", "striped"), groups, windows, (False, True)):
        name = "-".join(map(str, case))
        if case in HAS_HUNG or ALL or of_the_day(name, 40) == 0:
            yield pytest.param(*case, id=name)


FUSES = jax.version.__version_info__ >= (0, 11, 1)


@pytest.mark.skipif(not FUSES, reason="this XLA makes no fusions of calls with slices of their operands")
@pytest.mark.parametrize(("platform", "strategy", "layout", "heads", "window", "deterministic"), list(backward_calls()))
def test_changed_arrays_have_memory_of_their_own(platform, strategy, layout, heads, window, deterministic):
    """No call has one operand for two results that it changes in place."""
    size, hosts = SHORT[strategy]
    request = dict(size=size, hosts=hosts, platform=platform, tokens=2048, strategy=strategy, window=WINDOWS[window])
    with patch.object(cute_calls, "_code", lambda *_: b"a placeholder"):  # XLA reads no further than that there is one
        try:
            program = lowered(True, layout, heads=heads, deterministic=deterministic, **request)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
    assert equal_in_program(program.compile(compiler_options=settings(hosts)).as_text()) == []


def test_one_operand_for_two_changed_arrays_is_found():
    """As XLA fuses a call with a slice of its operands, where the two are equal."""
    if cute_calls.changed():
        pytest.skip(f"{cute_calls.changed()}: make test-gpu-aot")
    mesh = topologies.make_mesh(gpus(2), (2,), ("ring",))

    def changed(x):
        arrays = (jnp.zeros((4, 128), jnp.int32), jnp.zeros((4, 128), jnp.int32))
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        call = jax.ffi.ffi_call(cute_calls._TARGET, types, input_output_aliases={1: 0, 2: 1})
        return call(x[:1024], *arrays, module=b"a placeholder", key=b"")

    cute_calls.register()
    function = jax.jit(jax.shard_map(changed, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False))
    array = shard((2 * 2048, 256), jnp.float32, mesh, P("ring"))
    text = function.trace(array).lower(lowering_platforms=("cuda",)).compile(compiler_options=settings(1)).as_text()
    assert bool(equal_in_program(text)) is FUSES, text


def test_decoding_copies_no_keys_and_joins_in_one_collective():
    """One token on four GPUs, 64k keys on each: the kernel gets them in parts as they lie."""
    pytest.importorskip("jax_triton", reason="it calls Triton's kernels and is not installed: make test-gpu-aot")
    mesh, place, keys = topologies.make_mesh(gpus(4), (4,), ("ring",)), on_gpus("ring", 4), 65536
    options = Options(platform="triton", strategy="decode", lse_gradient=False)

    def local(query, key, q_ids, kv_ids):
        spec, operands = make_spec(options, Operands(query, key, key, q_segment_ids=q_ids, kv_segment_ids=kv_ids), place)
        return spec.strategy.forward(spec, operands)[0]

    rows = P("ring")  # each GPU's own arrays lie behind one another, as from torch
    query, key = (shard((4, tokens, heads, DIM), jnp.bfloat16, mesh, rows) for tokens, heads in ((1, HEADS), (keys, KV_HEADS)))
    ids = [shard((4, tokens), jnp.int32, mesh, rows) for tokens in (1, keys)]
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    with with_cudnn():
        found = function.trace(query, key, *ids).lower(lowering_platforms=("cuda",))
    program = found.compile(compiler_options={"xla_gpu_cuda_data_dir": toolkit()})
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    text = program.as_text()
    # XLA of jax 0.11 writes a collective that nothing runs beside as one instruction.
    collectives = ("all-gather", "collective-permute", "all-reduce")
    assert [text.count(f" {name}(") + text.count(f" {name}-start(") for name in collectives] == [1, 0, 0]
    assert "bf16[32,2048,8,128]" in text  # in 32 parts
