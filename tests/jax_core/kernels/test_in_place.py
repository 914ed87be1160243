"""Of the arrays that a kernel's call changes in place no two are equal (in_place.py), in every strategy, without a compiler.

The same is read in programs compiled for GPUs by tests/jax_core/strategies/test_gpu_program.py.
"""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_cases import ring_mesh
from effort import ALL, of_the_day
from in_place import changing_calls, equal_in_jaxpr, equal_in_program
from jax.sharding import PartitionSpec as P

import jax_core
from jax_core.kernels.cute import calls as cute
from jax_core.kernels.triton import launch as triton
from jax_core.request import hardware

SIZE, TOKENS = 2, 512
STRATEGIES = ("all_gather", "ring", "ulysses")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """As far as a trace goes: kernels' calls without what they call."""
    for module in (cute, triton):
        monkeypatch.setattr(module, "missing", lambda *_: None)
    monkeypatch.setattr(hardware, "capability", lambda backend: 90)
    monkeypatch.setattr(cute, "_code", lambda *_: b"")
    monkeypatch.setattr(cute, "register", lambda: None)
    monkeypatch.setattr(triton, "_call", _triton_call)


def _triton_call(arrays: Any, types: Any, aliases: dict[int, int], settings: Any) -> Any:
    return jax.ffi.ffi_call("triton", types, input_output_aliases=aliases, vmap_method="sequential")(*arrays)


def traced(platform: str, strategy: str = "ring", layout: str = "zigzag", kv_heads: int = 2, batch: int = 1, **options: Any) -> Any:
    """Of output and gradients."""
    query, key = (jax.ShapeDtypeStruct((batch, SIZE * TOKENS, heads, 64), jnp.bfloat16) for heads in (4, kv_heads))
    asked = dict(axis_name="ring", causal=True, platform=platform, strategy=strategy, layout=layout) | options
    rows = P(None, "ring")

    def loss(q: Any, k: Any, v: Any) -> Any:
        def attend(*qkv: Any) -> Any:
            return jax_core.ring_attention(*qkv, **asked)

        out = jax.shard_map(attend, mesh=ring_mesh(SIZE), in_specs=rows, out_specs=rows, check_vma=False)(q, k, v)
        return out.astype(jnp.float32).sum()

    return jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, key)


def every_call() -> Any:
    cases = product(
        ("cute", "triton"), STRATEGIES, ("contiguous", "zigzag", "striped"), (2, 4), (None, (200, 0)), (True, False), (1, 2)
    )
    for case in cases:
        name = "-".join(map(str, case))
        if ALL or of_the_day(name, 12) == 0:
            yield pytest.param(*case, id=name)


@pytest.mark.parametrize(("platform", "strategy", "layout", "kv_heads", "window", "deterministic", "batch"), list(every_call()))
def test_no_two_changed_arrays_are_equal(platform, strategy, layout, kv_heads, window, deterministic, batch):
    request = dict(strategy=strategy, layout=layout, kv_heads=kv_heads, batch=batch, sliding_window=window)
    try:
        program = traced(platform, deterministic=deterministic, **request)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert equal_in_jaxpr(program) == []


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_locks_of_a_deterministic_backward(layout):
    """What has made two GPUs wait for ever (all_gather, zigzag, grouped heads)."""
    program = traced("cute", "all_gather", layout, deterministic=True)
    assert changing_calls(program) > 0
    assert equal_in_jaxpr(program) == []


def test_equal_arrays_are_found():
    def changed(zeros: Any) -> Any:
        call = jax.ffi.ffi_call("kernel", [jax.ShapeDtypeStruct((4,), "float32")] * 2, input_output_aliases={0: 0, 1: 1})
        return jax.make_jaxpr(lambda: call(*zeros()))()

    assert equal_in_jaxpr(changed(lambda: (jnp.zeros(4), jnp.zeros(4))))
    assert not equal_in_jaxpr(changed(lambda: (jnp.full(4, 0.0), jnp.full(4, -0.0))))


@pytest.mark.parametrize(("second", "found"), [("%zeros", 1), ("%others", 0)])
def test_one_operand_of_a_compiled_call_is_found(second, found):
    """As XLA writes it, whatever follows in the line."""
    aliasing = "output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}, api_version=X"
    call = f"ROOT %call = (s32[4], s32[4]) custom-call(%q, %zeros, {second}), {aliasing}"
    assert len(equal_in_program(f"%body (q: f32[8]) -> (s32[4], s32[4]) {{\n  {call}\n}}\n")) == found
