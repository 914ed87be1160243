"""The fused strategy against the oracle in Pallas' TPU interpreter, which also looks for races, and compiled for TPUs that are not
here."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CAUSAL,
    PACKED,
    PACKED_BOTH,
    SINKS,
    Case,
    booleans,
    make_cotangents,
    make_inputs,
    normal,
    over,
    positions,
    positive,
    ring_mesh,
    ring_output,
    ring_results,
    seed,
    segments,
)
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle_assertions import assert_like_the_oracle
from poison import PADDED, assert_padding_holds_anything
from tpu_interpreter import tpus_interpreted

import jax_core
from jax_core.masks.layout import LAYOUTS
from jax_core.masks.static import make_mask
from jax_core.strategies.fused_ring import frame
from jax_core.strategies.fused_ring.constants import route
from jax_core.strategies.fused_ring.rotation import RemoteTransfer
from jax_core.testing.oracle import reference_attention

pytestmark = pytest.mark.costly  # interpreted, most of it


def race_detector(**settings):
    """Runs kernels in the interpreter that prints ``RACE DETECTED`` when it sees one."""
    # Every DMA under way has a clock: with few of them two would share one, and a race between them would not show.
    return tpus_interpreted(pltpu.InterpretParams(detect_races=True, vector_clock_size=64, **settings))


def case(name: str, **settings) -> Case:
    defaults: dict[str, Any] = dict(ring=4, queries=24, batch=1, heads=1, kv_heads=1, block=None, settings={"strategy": "fused"})
    return Case(f"fused {name}", **(defaults | settings))


CASES = (
    case("full, grouped heads, odd length", queries=23, heads=2, slow=True),
    case("causal contiguous, sinks", heads=2, kv_heads=2, options=CAUSAL, arrays=SINKS, slow=True),
    case("causal zigzag, segments", layout="zigzag", options=CAUSAL, arrays=PACKED),
    case(
        "causal striped, soft cap", layout="striped", queries=21, spread=5.0, options=CAUSAL | {"logits_soft_cap": 2.5}, slow=True
    ),
    case("window", queries=20, options=CAUSAL | {"sliding_window": 23}, slow=True),
    case("window of two sides", layout="zigzag", ring=3, options={"sliding_window": (30, 7)}, slow=True),
    case("chunks, more keys", layout="striped", ring=2, queries=18, keys=31, value_dim=13, options={"chunk_size": 11}, slow=True),
    case("segments of a batch, no LSE", ring=2, queries=18, keys=26, batch=2, arrays=PACKED_BOTH, lse_cotangent=False, slow=True),
    case("several blocks", ring=2, queries=300, dtype="bfloat16", options=CAUSAL, block=128, slow=True),
    case("ring of eight", ring=8, queries=6, options=CAUSAL, layout="zigzag", slow=True),
)


@over(CASES)
def test_against_the_oracle(case: Case, capsys):
    """Output, LSE and every gradient; and no race."""
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    with race_detector():
        got = ring_results(case, inputs, cotangents)
    said = capsys.readouterr().out
    assert_like_the_oracle(case, got, inputs, cotangents)
    assert "RACE DETECTED" not in said
    assert "non-zero count" not in said  # of a semaphore, when a kernel ends


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_may_hold_anything(layout: str):
    with tpus_interpreted(pltpu.InterpretParams()):
        assert_padding_holds_anything(case("padding", ring=2, queries=12, layout=layout, options=CAUSAL, arrays=PADDED | SINKS))


@pytest.mark.slow
def test_padding_of_one_side_may_hold_anything():
    arrays = {"q_segment_ids": segments("q"), "kv_segment_ids": segments("kv", padding=0.3)}
    with tpus_interpreted(pltpu.InterpretParams()):
        assert_padding_holds_anything(case("padded keys", queries=10, keys=14, arrays=arrays))


# ------------------------------------------------------------------------------------------------------------------ races


WAITS = ("credit", "shards arrival", "shards departure")
OF_GRADIENTS = ("gradients arrival", "gradients departure")


def leave_out(wait: str, monkeypatch) -> None:
    """Kernels that are traced from now on have no such wait."""
    if wait == "credit":
        monkeypatch.setattr(frame, "wait_credits", lambda credit: None)
        return
    name, end = wait.split()
    method = {"arrival": "wait_arrived", "departure": "wait_departed"}[end]
    waits = getattr(RemoteTransfer, method)
    monkeypatch.setattr(RemoteTransfer, method, lambda self, step: None if self.name == name else waits(self, step))


@pytest.mark.parametrize("without", [*WAITS, *(pytest.param(wait, marks=pytest.mark.slow) for wait in OF_GRADIENTS)])
def test_a_wait_left_out_is_a_race(without: str, monkeypatch, capsys):
    """The detector finds nothing because all waits are needed and there, not because it is blind."""
    leave_out(without, monkeypatch)
    # A copy made as late as can be is never made if nobody waits for it, so what is to arrive must be copied at once.
    mode = "eager" if "arrival" in without else "on_wait"
    small = case(f"without {without}")
    with race_detector(dma_execution_mode=mode):
        if without in WAITS:
            ring_output(small, make_inputs(small))
        else:
            ring_results(small, make_inputs(small), make_cotangents(small))
    assert "RACE DETECTED" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ the choice

REFUSED = {
    "a bias": {"arrays": {"bias": normal(1, 1, "T", "S")}},
    "a boolean mask": {"arrays": {"mask": booleans(1, 1, "T", "S")}},
    "position ids": {"arrays": {"q_position_ids": positions("q", "shifted")}},
    "ALiBi": {"arrays": {"alibi_slopes": positive("H")}},
    "dropout": {"options": {"dropout_prob": 0.5}, "arrays": {"dropout_seed": seed()}},
    "mask functions": {"options": {"mask_mod": lambda b, h, q, k: q >= k}},
    "takes bfloat16, float32": {"dtype": "float16"},
    "at most 256": {"dim": 257},
    "ring of one": {"ring": 1},
    "nothing to send": {"options": {"chunk_size": 24}},
    "fused_backward=True": {"settings": {"strategy": "fused", "fused_backward": True}},
    "multiples of 128": {"block": 16},
    "a kernel of its own, in pallas": {"settings": {"strategy": "fused", "platform": "xla"}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_it_refuses(reason: str):
    asked = case("refused", **REFUSED[reason])
    with race_detector(), pytest.raises(NotImplementedError, match=f'strategy="fused": .*{re.escape(reason)}.*use strategy="auto"'):
        ring_output(asked, make_inputs(asked))


def test_cpus_are_refused():
    asked = case("refused")
    with pytest.raises(
        NotImplementedError, match=r'strategy="fused": the Pallas kernels need a TPU, and .* on "cpu"; use strategy="auto"'
    ):
        ring_output(asked, make_inputs(asked))


def test_64_bits_are_refused():
    """Ids would be cut to 32: two segments that differ above would be one."""
    with race_detector(), jax.enable_x64(True):
        x, ids = jnp.zeros((1, 8, 1, 4), jnp.float32), jnp.array([0] * 4 + [2**32] * 4)
        with pytest.raises(NotImplementedError, match="ids of 64 bits"):
            jax_core.ring_attention(x, x, x, q_segment_ids=ids, mesh=ring_mesh(2), strategy="fused")


def test_unknown_strategies_are_refused():
    asked = case("unknown", settings={"strategy": "both"})
    with pytest.raises(ValueError, match=r"strategy must be one of auto, ring, fused, .*; got 'both'"):
        ring_output(asked, make_inputs(asked))


@pytest.mark.parametrize(
    ("mask", "way"),
    [
        (make_mask(), ((1, -1), 3)),  # opposite ways, whatever they cost
        (make_mask(causal=True, window=10), ((1, 1), 1)),  # what looks one shard back comes from there, both halves
        (make_mask(window=(0, 10)), ((-1, -1), 1)),
        (make_mask(window=(3, 3)), ((-1, 1), 1)),  # first halves are seen from behind, second ones from ahead
        (make_mask(chunk=12), ((1, -1), 0)),
    ],
)
def test_the_way_that_halves_take(mask, way):
    assert route(mask, "contiguous", 4, 12, 12) == way


# ------------------------------------------------------------------------------------------------------- compiled for TPUs


def tpus(topology: str) -> np.ndarray:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: make test-tpu")
    return np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


# A ring of the topology's links, as numbers of its devices in their own order.
RINGS = {
    "v5e:2x4": (0, 1, 3, 5, 7, 6, 4, 2),
    "v6e:2x4": (0, 1, 3, 5, 7, 6, 4, 2),
    "v5p:2x2x2": (0, 1, 3, 2, 6, 7, 5, 4),
    "tpu7x:2x2x1": (0, 1, 2, 3, 6, 7, 4, 5),
}


def compiled(
    topology: str,
    strategy: str,
    length: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype="bfloat16",
    segments=False,
    **options,
):
    """Forward and backward at ``length`` tokens a chip."""
    mesh = Mesh(tpus(topology)[list(RINGS[topology])], ("ring",))
    settings = dict(mesh=mesh, causal=True, layout="zigzag", strategy=strategy) | options

    def gradients(query, key, value, dout, ids=None):
        attend = partial(jax_core.ring_attention, q_segment_ids=ids, **settings)
        out, transpose = jax.vjp(lambda *operands: attend(*operands), query, key, value)
        return out, transpose(dout)

    tokens = mesh.size * length
    split = NamedSharding(mesh, P(None, "ring"))
    arguments = [
        jax.ShapeDtypeStruct((1, tokens, count, dim), dtype, sharding=split) for count in (heads, kv_heads, kv_heads, heads)
    ]
    if segments:
        arguments.append(jax.ShapeDtypeStruct((1, tokens), "int32", sharding=split))
    return jax.jit(gradients).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("topology", RINGS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_it_compiles_for(topology: str, dim: int, capsys):
    """8k tokens a chip, 32:8 heads: blocks fit VMEM, and nothing but the kernels sends."""
    program = compiled(topology, "fused", 8192, dim=dim)
    text, memory = program.as_text(), program.memory_analysis()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    for collective in ("collective-permute", "all-gather", "all-to-all", "all-reduce"):
        assert collective not in text
    with capsys.disabled():
        used, given = (size / 2**20 for size in (memory.temp_size_in_bytes, memory.argument_size_in_bytes))
        print(f"\n{topology}, dim {dim}: {used:.0f} MiB beside {given:.0f} MiB of operands")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_feature_compiles(dtype: str):
    """In lengths that no block divides."""
    options = dict(sliding_window=700, logits_soft_cap=30.0, softmax_aux=jnp.zeros(4), segments=True)
    text = compiled("v5e:2x4", "fused", 330, heads=4, kv_heads=2, dim=80, dtype=dtype, **options).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2


def test_auto_leaves_it_to_its_name_on_tpus():
    text = compiled("v5e:2x4", "auto", 256, heads=2, kv_heads=1).as_text()
    assert "tpu_custom_call" in text
    assert "collective-permute" in text


def test_what_a_tpu_sends_into_is_in_hbm():
    """Small results too, which XLA would keep in VMEM, its memory space 1."""
    text = compiled("v5e:2x4", "fused", 256, heads=2, kv_heads=1).as_text()
    results = re.findall(r"= \((.*)\) custom-call\(.*tpu_custom_call", text)
    assert len(results) == 2
    assert not any("S(1)" in types for types in results)


# ----------------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize(
    "ring", [*(pytest.param(ring, marks=pytest.mark.slow) for ring in ("inner", ("outer", "inner"))), ("inner", "outer")]
)
def test_on_meshes_of_two_axes(ring: str | tuple[str, ...], capsys):
    """A ring beside others on one mesh, and rings over two axes in either order. Beside others, heads are split."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("outer", "inner"))
    split = P(None, ring, "outer" if ring == "inner" else None)
    operands = make_inputs(case("mesh", queries=12, heads=2, kv_heads=2)).values()
    attend = partial(jax_core.ring_attention, mesh=mesh, in_specs=(split,) * 3, causal=True, strategy="fused")
    with race_detector():
        got = jax.jit(attend)(*operands)
    assert "RACE DETECTED" not in capsys.readouterr().out
    np.testing.assert_allclose(got, reference_attention(*operands, causal=True)[0], atol=1e-6)


def test_entries_under_vmap_come_one_after_another():
    asked = case("vmap", ring=2, layout="zigzag", options=CAUSAL, mode="mesh")
    inputs = {name: np.stack([array, array[:, ::-1]]) for name, array in make_inputs(asked).items()}

    def attend(query, key, value, strategy: str):
        settings = dict(mesh=ring_mesh(2), causal=True, layout="zigzag", strategy=strategy)
        return jax_core.ring_attention(query, key, value, **settings)

    both = jax.jit(lambda *operands: [jax.vmap(partial(attend, strategy=name))(*operands) for name in ("fused", "ring")])
    with race_detector():
        np.testing.assert_allclose(*both(*inputs.values()), atol=1e-6)
