"""Every Triton kernel, with the parameters that the library gives it, compiles to machine code for Ampere, Hopper and Blackwell and
fits there; no GPU is needed.

`pytest -rP tests/jax_core/kernels/test_triton_compiles.py` shows what each uses.
"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P

from jax_core.kernels.triton import launch
from jax_core.masks.plan import Plan
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted: unset TRITON_INTERPRET"),
    pytest.mark.slow,
]

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may have
RING, BATCH, HEADS, KV_HEADS = 4, 2, 4, 2
IDS = ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids")
PIECES = Plan(128, tuple(tuple(range(rank, 32, RING)) for rank in range(RING)))


class Case(NamedTuple):
    """``everything``: all that an attention may have at once, with lengths that are no multiple of a block. ``each_step``: the
    kernels of all steps of a ring, and of a fused backward; otherwise each kernel once. ``planned``: of pieces from anywhere."""

    dim: int
    value_dim: int
    dtype: str
    everything: bool = False
    each_step: bool = False
    planned: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("everything", "each_step", "planned") if getattr(self, name)]
        return "-".join([str(self.dim), str(self.value_dim), self.dtype, *flags])


class Launch(NamedTuple):
    """What jax-triton is asked for: a kernel, the dtypes of its arrays (results last), its constants and settings."""

    kernel: Any
    dtypes: tuple[str, ...]
    const: Any
    num_warps: int
    num_stages: int


class Use(NamedTuple):
    kernel: str
    shared: int  # bytes of a program
    tensor_memory: int  # columns of a program; only Blackwell has it
    registers: int
    spilled: int  # bytes of a thread


# A row of the table of parameters each; then dims that are no power of two, and all kinds of step.
EVERYWHERE = [Case(dim, dim, dtype) for dtype in ("bfloat16", "float32") for dim in (64, 128, 256)]
EVERYWHERE += [Case(128, 128, "bfloat16", everything=True)]
ON_HOPPER = [
    Case(80, 80, "float16"),
    Case(128, 128, "bfloat16", planned=True),
    Case(192, 128, "bfloat16"),
    Case(256, 256, "bfloat16", everything=True),
]
ON_HOPPER += [Case(64, 64, "bfloat16", everything=True, each_step=True)]
CASES = [(capability, case) for capability in SHARED_MEMORY for case in EVERYWHERE] + [(90, case) for case in ON_HOPPER]


def _marks(capability: int, case: Case) -> list[pytest.MarkDecorator]:
    """Half a minute each, and more with everything; sm_90 is what GPU tests run on."""
    return [pytest.mark.costly] if capability != 90 or case.everything else []


PARAMETERS = [
    pytest.param(capability, case, id=f"sm_{capability}-{case}", marks=_marks(capability, case)) for capability, case in CASES
]


@pytest.mark.wide
@pytest.mark.parametrize(("capability", "case"), PARAMETERS)
def test_kernels_compile_and_fit(capability, case, tmp_path):
    asked = launches(case, capability, fused=False)
    found = asked + launches(case, capability, fused=True) if case.each_step else {each.kernel: each for each in asked}.values()
    uses = [use(each, capability, tmp_path) for each in dict.fromkeys(found)]
    print(*uses, sep="\n")
    assert {"forward_kernel", "keys_kernel", "queries_kernel"} <= {each.kernel for each in uses}
    assert not [each for each in uses if each.shared > SHARED_MEMORY[capability]]
    assert not [each for each in uses if each.tensor_memory > 512]  # Triton would emit a trap
    assert not [each for each in uses if each.spilled > most_spilled(capability, case, each.kernel)]


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(128, "bfloat16"), (256, "bfloat16"), (80, "float16"), (256, "float32"), (128, "float32"), (32, "bfloat16")],
)
def test_decoding_compiles_and_fits(dim, dtype, tmp_path):
    """With all that a cache may ask for at once; and without anything."""
    for everything in (True, False):
        for asked in decoding_launches(dim, dtype, everything):
            used = use(asked, 90, tmp_path)
            print(used)
            assert used.shared <= SHARED_MEMORY[90] // (1 if dtype == "float32" else 2)  # two programs at once
            assert used.spilled <= (512 if dtype == "float32" else 0)  # eight warps spill nothing, and take up to 1.8 times as long


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.costly)])
@pytest.mark.parametrize(("rows", "columns", "dtype"), [(128, 64, "bfloat16"), (128, 128, "bfloat16"), (16, 80, "float16")])
def test_sums_over_tokens_compile_and_fit(rows, columns, dtype, capability, tmp_path):
    from jax_core.kernels.triton.sums_kernel import sums_kernel
    from ring_attn.recurrence.sums import SETTINGS, constants_of

    arrays = (dtype, dtype, "float32", "float32")
    used = use(Launch(sums_kernel, (*arrays, "i32", "i32"), constants_of(8, 2, rows, columns), **SETTINGS), capability, tmp_path)
    print(used)
    assert used.shared <= SHARED_MEMORY[capability] // 2 and used.spilled == 0


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.costly) for other in (80, 89, 100, 120))])
@pytest.mark.parametrize(
    ("key_dim", "dtype", "vector"),
    [(128, "bfloat16", False), (64, "float16", True), (8, "float16", False), (256, "bfloat16", True), (128, "float32", True)],
)
def test_passes_of_a_delta_rule_compile_and_fit(key_dim, dtype, vector, capability, tmp_path):
    from jax_core.kernels.triton.delta_rule_kernels import back_kernel, maps_kernel
    from ring_attn.recurrence.passes import fits, parameters_of

    keys, u = torch.empty(1, 1, 4, key_dim, dtype=getattr(torch, dtype)), torch.empty(1, 1, 8, 128)
    decays = torch.empty(1, 1, 8, *((key_dim,) if vector else ()))
    const, settings = parameters_of(keys, keys, u, decays, None, capability)
    const, of_keys, of_documents = replace(const, documents=True), (dtype,) * 3, ("int64", "int64", "int64", "i32")
    back = (*of_keys, "float32", dtype, dtype, "fp32", "int64", "int64", "i32", "float32")
    for kernel, dtypes in ((maps_kernel, (*of_keys, "float32", *of_documents, "float32", "float32")), (back_kernel, back)):
        used = use(Launch(kernel, dtypes, const, **settings), capability, tmp_path)
        print(used)
        assert fits(keys) and used.shared <= SHARED_MEMORY.get(capability, 99 * 1024)
        assert used.spilled <= 256 or capability != 90


def decoding_launches(dim: int, dtype: str, everything: bool) -> list[Launch]:
    from jax_core.kernels.triton.decode_kernels import (
        AppendConstants,
        JoinConstants,
        append_kernel,
        decode_kernel,
        join_kernel,
    )
    from torch_bridge.attention.decoding import constants_of, settings_of

    shape = jax.ShapeDtypeStruct
    ids = {name: shape((BATCH, 4 if name[0] == "q" else 8192), jnp.int32) for name in IDS} if everything else {}
    slopes = {"alibi_slopes": shape((HEADS,), jnp.float32)} if everything else {}
    q, k = shape((BATCH, 4, HEADS, dim), dtype), shape((BATCH, 8192, KV_HEADS, dim), dtype)
    operands = Operands(q, k, k, **ids, **slopes)
    plain = Options(strategy="decode", platform="triton")
    options = replace(plain, causal=True, sliding_window=(300, 0), logits_soft_cap=30.0) if everything else plain
    with patch.object(launch, "jax_triton", SimpleNamespace):
        spec, operands = make_spec(options, operands, Placement("ring", RING, backend="gpu", capability=90))
    const = constants_of(spec, operands.given)
    arrays = (dtype,) * 3 + ("int32",) * 4 + ("float32",) * 2
    joined = JoinConstants(const.parts, 64, 4, HEADS, dim, const.value_dim_block, int(everything), True)
    among_others = replace(joined, sinks=0, last=False, rank=1, ranks=2)
    numbers = KV_HEADS * dim
    kept = numbers, 1 << (numbers - 1).bit_length(), 4 * numbers, numbers
    return [
        Launch(decode_kernel, arrays, const, **settings_of(const)),
        Launch(join_kernel, ("float32", "float32", dtype, "float32"), joined, 4, 2),
        Launch(join_kernel, ("float32",) * 4, among_others, 4, 2),
        Launch(append_kernel, ("int64", *(dtype,) * 4), AppendConstants(8192, *kept, *kept), 4, 2),
    ]


def most_spilled(capability: int, case: Case, name: str) -> int:
    """Nothing where most calls spend their time; elsewhere a little, and more with float32, whose products take many registers."""
    if case.dtype == "float32" or case.everything:
        return 4096
    common = capability == 90 and case.dim <= 128 and name in ("forward_kernel", "queries_kernel")
    return 0 if common else 1024


def launches(case: Case, capability: int, fused: bool) -> list[Launch]:
    """What a zigzag ring launches with the library's parameters, forward and backward; nothing is compiled or run."""
    asked: list[Launch] = []

    def triton_call(*arrays, kernel, out_shape, const, num_warps, num_stages, **_):
        asked.append(Launch(kernel, tuple(x.dtype.name for x in (*arrays, *out_shape)), const, num_warps, num_stages))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    def local(operands, out, lse):
        options = everything if case.everything else Options(causal=True)
        options = replace(options, platform="triton", layout=PIECES if case.planned else "zigzag", fused_backward=fused)
        spec, operands = make_spec(options, operands, Placement("ring", RING, backend="gpu", capability=capability))
        return spec.strategy.forward(spec, operands), spec.strategy.backward(spec, operands, out, lse, out)

    everything = Options(causal=True, sliding_window=(300, 200), chunk_size=512, logits_soft_cap=30.0, dropout_prob=0.1)
    mesh = jax.make_mesh((RING,), ("ring",), devices=jax.devices()[:RING], axis_types=(jax.sharding.AxisType.Auto,))
    library = SimpleNamespace(__version_info__=(0, 3), triton_call=triton_call)
    with patch.object(launch, "jax_triton", lambda: library):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), *shards(case))
    return asked


def shards(case: Case) -> tuple[Operands, Any, Any]:
    """A rank's operands, output and LSE."""
    length = 1000 if case.everything else 1024
    shape = jax.ShapeDtypeStruct
    query, key = (shape((BATCH, length, heads, case.dim), case.dtype) for heads in (HEADS, KV_HEADS))
    value, out = (shape((BATCH, length, heads, case.value_dim), case.dtype) for heads in (KV_HEADS, HEADS))
    lse, ids = shape((BATCH, HEADS, length), jnp.float32), shape((BATCH, length), jnp.int32)
    if not case.everything:
        return Operands(query, key, value), out, lse
    extras = dict(
        bias=shape((1, HEADS, length, RING * length), case.dtype),
        mask=shape((BATCH, 1, length, RING * length), jnp.bool_),
        q_segment_ids=ids,
        q_position_ids=ids,
        alibi_slopes=shape((HEADS,), jnp.float32),
        dropout_seed=shape((2,), jnp.uint32),
        origin=shape((2,), jnp.int32),
    )
    return Operands(query, key, value, **extras), out, lse


_TRITON_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64", "uint32": "u32"}


def use(asked: Launch, capability: int, folder: Path) -> Use:
    """Compiles to machine code."""
    names = [name for name in asked.kernel.arg_names if name != "const"]
    pointers = {dtype: f"*{name}" for dtype, name in _TRITON_NAMES.items()}  # beside which a kernel may take numbers
    signature = {name: pointers.get(dtype, dtype) for name, dtype in zip(names, asked.dtypes, strict=True)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, dtype in enumerate(asked.dtypes) if dtype in pointers}
    source = triton.compiler.ASTSource(asked.kernel, signature | {"const": "constexpr"}, {"const": asked.const}, aligned)
    options = dict(num_warps=asked.num_warps, num_stages=asked.num_stages, enable_fp_fusion=True)
    program = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(program.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL"))
    tensor_memory = getattr(program.metadata, "tmem_size", None) or 0
    return Use(asked.kernel.__name__, program.metadata.shared, tensor_memory, registers, stack + local)
