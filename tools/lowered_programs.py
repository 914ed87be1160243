"""The programs that a fixed list of calls is lowered to, as text without names and metadata: two versions of the library that print
the same text compute the same.

    python tools/lowered_programs.py OUT                                    # JAX: each kernel and layout, forward and backward
    torchrun --standalone --nproc-per-node 2 tools/lowered_programs.py OUT  # what torch's processes compile
    diff -rq BEFORE AFTER

No GPU and no TPU is needed: Triton's kernels are shown as Triton's own IR, Pallas' as jaxprs, cuDNN's as custom calls.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "RANK" not in os.environ:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_core

SIZE, LENGTH, HEADS, KV_HEADS, DIM = 4, 512, 4, 2, 64  # lengths are those of the whole sequence
LAYOUTS = ("contiguous", "zigzag", "striped")
Call = tuple[dict[str, Any], dict[str, Any]]  # options, arrays


def calls() -> dict[str, Call]:
    """The calls, by name; a kernel that refuses one gives its message as the text."""
    ids = np.repeat(np.arange(8, dtype=np.int32), LENGTH // 8)[None]
    rows = (1, HEADS, LENGTH, LENGTH)
    return {
        "full": ({}, {}),
        "causal": (dict(causal=True), {}),
        "window": (dict(causal=True, sliding_window=(100, 0)), {}),
        "chunks": (dict(chunk_size=96), {}),
        "scores": (dict(causal=True, logits_soft_cap=20.0, softmax_scale=0.3), dict(softmax_aux=np.zeros(HEADS, np.float32))),
        "dropout": (dict(causal=True, dropout_prob=0.1, dropout_seed=3), dict(alibi_slopes=np.ones(HEADS, np.float32))),
        "segments": (dict(causal=True), dict(q_segment_ids=ids)),
        "positions": (dict(causal=True, sliding_window=40), dict(q_position_ids=ids * 0 + np.arange(LENGTH, dtype=np.int32))),
        "bias": ({}, dict(bias=np.zeros(rows, np.float32), mask=np.ones((1, 1, *rows[2:]), bool))),
        "function": (dict(mask_mod=lambda b, h, q, k: (q - k) % 3 != h), {}),
    }


SPECS = {
    "bias": P(None, None, "ring"),
    "mask": P(None, None, "ring"),
    "q_segment_ids": P(None, "ring"),
    "q_position_ids": P(None, "ring"),
}


def lowered(call: Call, dtype: str, layout: str, size: int, show: Callable, **options) -> str:
    """Forward and backward of one call over a ring of ``size``, as returned by ``show(function, arrays)``."""
    settings, arrays = call
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))
    shape = jax.ShapeDtypeStruct
    qkv = [shape((2, LENGTH, heads, DIM), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    specs = {name: SPECS.get(name, P()) for name in arrays}

    in_specs, out_specs = (P(None, "ring"),) * 3 + (specs,), (P(None, "ring"), P(None, None, "ring"))

    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=options.get("platform") != "triton")
    def attend(query, key, value, more):
        ring = dict(axis_name="ring") if size > 1 else {}
        given = dict(layout=layout, return_lse=True) | settings | options
        results = jax_core.ring_attention(query, key, value, **more, **ring, **given)
        return results if isinstance(results, tuple) else (results, jnp.zeros(query.shape[:1] + query.shape[2:0:-1], jnp.float32))

    def both(*operands):
        results, transpose = jax.vjp(attend, *operands)
        return results, transpose(jax.tree.map(jnp.ones_like, results))

    try:
        return show(both, (*qkv, arrays))
    except (NotImplementedError, ValueError) as error:
        return f"refused: {type(error).__name__}"


def as_stablehlo(platform: str, function: Callable, arrays) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def as_jaxpr(function: Callable, arrays) -> str:
    return str(jax.make_jaxpr(function)(*arrays))


def without_names(text: str) -> str:
    """Renames symbols in order of appearance; drops source locations and function names."""
    text = re.sub(r"loc\(.*?\)|#loc.*|name_and_src_info=[^\n]*|metadata=.*|0x[0-9a-f]+", "", text)
    text = re.sub(r"\bname=\S+|\bdebug_info=[^\n]*|/\S+\.py:\d+\S*", "", text)
    text = re.sub(r"\[\s*\n?\s*(out_)?names?=[^\n]*", "[", text)
    order: dict[str, str] = {}
    return re.sub(r'@"[^"]+"|@[\w.$]+', lambda match: order.setdefault(match[0], f"@f{len(order)}"), text)


# ------------------------------------------------------------------------------------------------------------- kernels


@contextmanager
def patched(answers: dict[tuple[Any, str], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for (module, name), answer in answers.items():
            stack.enter_context(patch.object(module, name, answer))
        yield


def first_of(*names: str) -> ModuleType:
    """A module that had another name in earlier versions."""
    for name in names[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(names[-1])


def triton_ir(*arrays, kernel, out_shape, grid, const, num_warps, num_stages, input_output_aliases, **_: Any):
    """Replaces jax-triton's call: the kernel's IR as an attribute of a call that is never run."""
    triton = import_module("triton")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint32": "u32", "bool": "i1"}
    names = [name for name in kernel.arg_names if name != "const"]
    dtypes = [x.dtype.name for x in (*arrays, *out_shape)]
    signature = {name: f"*{short[dtype]}" for name, dtype in zip(names, dtypes, strict=True)}
    source = triton.compiler.ASTSource(kernel, signature | {"const": "constexpr"}, {"const": const}, {})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    backend = triton.compiler.make_backend(target)
    options = backend.parse_options(dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True))
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    text = without_names(module.str_nodebug())
    KERNELS.setdefault(text, f"kernel {len(KERNELS)}")
    attributes = dict(grid=str(grid), warps=num_warps, stages=num_stages, kernel=KERNELS[text], aliases=str(input_output_aliases))
    return jax.ffi.ffi_call("triton_kernel", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape])(*arrays, **attributes)


KERNELS: dict[str, str] = {}


def kernels() -> Iterator[tuple[str, str, dict, Callable, dict]]:
    """``name, dtype, answers, show, options``: how each kernel is lowered here."""
    yield "xla", "float32", {}, partial(as_stablehlo, "cpu"), dict(platform="xla")
    launch = import_module("jax_core.kernels.triton.launch")
    library = SimpleNamespace(__version_info__=(0, 3), triton_call=triton_ir)
    hopper = (import_module("jax_core.request.hardware"), "capability"), lambda backend: 90
    on_hopper = dict([hopper, ((launch, "missing"), lambda *_: None), ((launch, "jax_triton"), lambda: library)])
    yield "triton", "bfloat16", on_hopper, partial(as_stablehlo, "cpu"), dict(platform="triton")
    cudnn = import_module("jax_core.kernels.cudnn.calls")
    private = cudnn.cudnn_attention(), "check_cudnn_version"
    answers = dict([hopper, ((cudnn, "missing"), lambda *_: None), (private, lambda: 91900)])
    yield "cudnn", "bfloat16", answers, partial(as_stablehlo, "cuda"), dict(platform="cuda", return_lse=False)
    tpu = first_of("jax_core.kernels.tpu.params", "jax_core.kernels.tpu.launch")
    missing = {(tpu, "missing"): lambda *_: None}
    yield "pallas", "bfloat16", missing, as_jaxpr, dict(platform="pallas")
    tpu_info = import_module("jax._src.pallas.mosaic.tpu_info")
    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    interpreted = partial(pl.pallas_call, interpret=pltpu.InterpretParams())  # can be traced without a TPU
    on_a_cpu = missing | {(tpu_info, "registry"): {"cpu": lambda: chip}, (pl, "pallas_call"): interpreted}
    yield "fused", "bfloat16", on_a_cpu, as_jaxpr, dict(strategy="fused")


def write_jax(folder: Path) -> None:
    for kernel, dtype, answers, show, options in kernels():
        for name, call in calls().items():
            for layout in LAYOUTS:
                for size in (1, SIZE) if name == "causal" else (SIZE,):
                    KERNELS.clear()
                    with patched(answers):
                        text = lowered(call, dtype, layout, size, show, **options)
                    text = "\n".join([without_names(text), *(f"{number}:\n{ir}" for ir, number in KERNELS.items())])
                    (folder / f"{kernel}-{name}-{layout}-{size}.txt").write_text(text)
        print(kernel, flush=True)


# --------------------------------------------------------------------------------------------------------------- torch


def write_torch(folder: Path) -> None:
    """Writes everything that is jitted while torch's calls run."""
    import torch
    import torch.distributed as dist

    import ring_attn

    dist.init_process_group("gloo")
    attend: Callable[..., Any] = ring_attn.ring_attention
    jit, texts = jax.jit, []

    def recorded(function=None, **settings):
        if function is None:
            return partial(recorded, **settings)
        jitted = jit(function, **settings)

        class Recorder:
            def __call__(self, *arrays, **named):
                texts.append(without_names(jitted.lower(*arrays, **named).as_text()))
                return jitted(*arrays, **named)

            def __getattr__(self, name):
                return getattr(jitted, name)

        return Recorder()

    from torch_bridge.start.runtime import start

    start()

    with patch.object(jax, "jit", recorded):
        for name, (options, arrays) in calls().items():
            for layout in LAYOUTS:
                torch.manual_seed(0)
                texts.clear()
                qkv = [torch.randn(2, LENGTH // 2, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
                words = dict(softmax_aux="sinks", dropout_prob="dropout_p", logits_soft_cap="softcap", softmax_scale="scale")
                more = {words.get(key, key): torch.from_numpy(array) for key, array in arrays.items()}
                rows = dict(bias=2, mask=2, q_segment_ids=1, q_position_ids=1)
                more = {key: ring_attn.shard(x, dim=rows[key], layout=layout) if key in rows else x for key, x in more.items()}
                given = {words.get(key, key): value for key, value in options.items()}
                out = attend(*qkv, layout=layout, **given, **more)
                out.sum().backward()
                if dist.get_rank() == 0:
                    (folder / f"torch-{name}-{layout}.txt").write_text("\n\n".join(texts))
    dist.destroy_process_group()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    (write_torch if "RANK" in os.environ else write_jax)(out)
