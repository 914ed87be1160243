"""The Triton kernels in Triton's interpreter, through the whole of jax_core, against the float64 oracle: `make test` runs this file
with TRITON_INTERPRET=1, in a process of its own. What they do on a GPU: tests/gpu/test_kernels.py."""

from dataclasses import replace

import numpy as np
import pytest
import triton_interpreter
from attention_cases import CASES, CAUSAL, Case, normal, ring_mesh
from far_positions import FAR
from oracle_assertions import assert_ring_is_like_the_oracle
from pairs import PAIRS, SMALL, check
from poison import HIDING, PADDED, assert_padding_holds_anything

import jax_core
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import triton
from jax_core.kernels.triton import launch
from jax_core.request import hardware
from jax_core.strategies.decode import arrangement
from jax_core.testing.oracle import reference_attention

# One of each feature; every layout, ring size and way of calling is run with the xla kernel already.
NAMES = (
    "causal zigzag", "causal striped", "bidirectional zigzag", "window cut by causal", "window of two sides", "window to the right",
    "chunks zigzag", "soft cap", "negative scale", "scale of zero", "grouped heads", "wide values", "narrow values", "more keys",
    "one query", "packed with padding", "segments of both sides", "positions of both sides", "positions and chunks", "bias",
    "bias of every head", "bias of every sequence", "one bias", "slopes per sequence", "sinks per head", "mask", "one mask",
    "mask of nothing", "mask function", "mask builder", "dropout", "mesh and specs", "float16 with everything",
)  # fmt: skip
FUSED = ("grouped heads", "slopes per sequence", "packed with padding")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(launch, "jax_triton", lambda: triton_interpreter)
    monkeypatch.setattr(launch, "missing", lambda *_: None)
    monkeypatch.setattr(hardware, "capability", lambda backend: 90)


def in_triton(case: Case, **settings) -> Case:
    """The case in a small shape, with key blocks of 32 (a word of a packed mask) or less."""
    masks = {"mask"} & case.arrays.keys() or {"mask_mod", "mask_builder"} & case.options.keys()
    return replace(
        case,
        block=32 if masks else 16,
        ring=min(case.ring, 2),
        batch=2 if any(array in case.arrays for array in ("bias", "mask", "alibi_slopes", "q_segment_ids")) else 1,
        heads=2 if case.heads == 4 else case.heads,
        kv_heads=1 if case.kv_heads == 2 else min(case.kv_heads, 2 if case.heads == 4 else case.kv_heads),
        settings={"platform": "triton", **settings},
        quick_compile=True,
    )


def against_the_oracle(case: Case) -> None:
    assert_ring_is_like_the_oracle(case)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name: str):
    against_the_oracle(in_triton(next(case for case in CASES if case.name == name)))


@pytest.mark.parametrize("ring", [2, 3])
def test_the_last_pair_gives_the_output_in_16_bits(ring: int):
    """Its partial result is in place for the LSE alone."""
    case = Case("half precision ring", ring=ring, layout="zigzag", dtype="float16", queries=20, batch=1, heads=2, kv_heads=1)
    against_the_oracle(replace(case, options=CAUSAL, block=16, settings={"platform": "triton"}))


@pytest.mark.wide
@pytest.mark.parametrize("name", FUSED)
def test_fused_backward(name: str):
    against_the_oracle(in_triton(next(case for case in CASES if case.name == name), fused_backward=True))


def test_padding_keys_stay_out_of_the_fused_backward():
    """Their weights would be infinite where the LSE is low."""
    case = in_triton(
        Case("low logits", queries=40, arrays={"bias": lambda rng, case: np.full((1, 1, 40, 40), -200.0)}), fused_backward=True
    )
    against_the_oracle(case)


@pytest.mark.parametrize("window", [2**31 - 1, (2**31 - 20, None)])
def test_the_widest_windows(window):
    for causal in (False, True):
        options = {"causal": causal, "sliding_window": window}
        against_the_oracle(in_triton(Case("widest windows", queries=40, options=options)))


def test_mask_functions_see_the_positions_as_they_came():
    """Though the kernels move negative ones by whole chunks."""
    ids = {"q_position_ids": lambda rng, case: np.arange(40, dtype=np.int32) - 20}
    options = {"chunk_size": 16, "mask_mod": lambda batch, head, q, k: k >= -5}
    against_the_oracle(in_triton(Case("negative positions", queries=40, options=options, arrays=ids)))


@pytest.mark.parametrize("name", FAR)
def test_positions_anywhere_among_32_bits(name: str):
    against_the_oracle(in_triton(FAR[name]))


@pytest.mark.parametrize("fused", [False, True])
def test_padding_holds_anything(fused: bool):
    arrays = PADDED | {"alibi_slopes": normal("H"), "bias": normal(1, "H", "T", "S")}
    case = Case("padding", ring=2, layout="zigzag", queries=20, options=CAUSAL, arrays=arrays)
    assert_padding_holds_anything(in_triton(case, fused_backward=fused))


def test_keys_that_a_mask_hides_hold_anything():
    assert_padding_holds_anything(in_triton(Case("hidden keys", queries=40, kv_heads=2, arrays={"mask": HIDING("H")})))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str):
    check(triton, PAIRS[name], SMALL)


@pytest.mark.parametrize(
    ("query", "settings", "message"),
    [
        ((1, 8, 2, 257), {}, "at most 256"),
        ((1, 8, 2, 16), {"cfg": jax_core.RingAttentionConfig(FwdParams(24, 16))}, "powers of two"),
        ((1, 8, 2, 16), {"cfg": jax_core.RingAttentionConfig(FwdParams(2048, 2048))}, "to 256"),
        ((1, 8, 2, 16), {"cfg": jax_core.RingAttentionConfig(bwd_params=BwdParams(num_warps=3))}, "num_warps"),
        ((1, 8, 2, 256), {"cfg": jax_core.RingAttentionConfig(FwdParams(256, 256))}, "bytes of shared memory"),
        ((70000, 1, 1, 16), {}, "at most 65535"),
        (
            (1, 8, 2, 16),
            {"cfg": jax_core.RingAttentionConfig(FwdParams(16, 16)), "mask_mod": lambda b, h, q, k: q >= k},
            "at least 32",
        ),
    ],
)
def test_what_it_refuses(query, settings, message):
    import jax.numpy as jnp

    x = jnp.ones(query)
    with pytest.raises(NotImplementedError, match=message):
        jax_core.ring_attention(x, x, x, platform="triton", **settings, **CAUSAL)


def test_decoding_reads_keys_once_for_all_heads_of_a_group(monkeypatch):
    """Rows are folded and keys cut into parts, with ids on both sides: every key at its own place on two ranks."""
    monkeypatch.setattr(arrangement, "_parts", lambda backend, programs, length: 2)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, *shape)).astype(np.float32) for shape in ((1, 4, 16), (80, 2, 16), (80, 2, 16)))
    positions, last = np.stack([rng.permutation(80) for _ in range(2)]).astype(np.int32), np.array([[79], [50]], np.int32)
    ids = dict(
        q_position_ids=last,
        kv_position_ids=positions,
        q_segment_ids=last * 0,
        kv_segment_ids=-(positions % 5 == 0).astype(np.int32),
    )
    options = dict(causal=True, sliding_window=30, softmax_aux=np.ones(4, np.float32), **ids)
    more = dict(platform="triton", strategy="decode", mesh=ring_mesh(2), return_lse=True)
    got, wanted = jax_core.ring_attention(query, key, value, **options, **more), reference_attention(query, key, value, **options)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
