"""The Pallas kernels in Pallas's interpreter, through the whole of jax_core, against the float64 oracle. What a TPU's compiler
makes of them: tests/jax_core/strategies/test_tpu_program.py."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, CAUSAL, SLOPES, Case, make_cotangents, make_inputs, normal, ring_results
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from oracle_assertions import assert_like_the_oracle
from pairs import PAIRS, SMALL, ShardPair, check
from poison import HIDING, PADDED, assert_padding_holds_anything
from tpu_interpreter import kernels_interpreted

import jax_core
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import tpu as pallas
from jax_core.kernels.contract import Problem, Scores
from jax_core.kernels.tpu import params
from jax_core.masks.layout import LAYOUTS
from jax_core.masks.static import make_mask

# One of each feature; every layout, ring size and way of calling is run with the xla kernel already.
NAMES = (
    "causal zigzag", "causal striped over four", "causal zigzag over eight", "bidirectional zigzag", "window cut by causal",
    "window of two sides", "window to the right", "chunks zigzag", "soft cap", "negative scale", "scale of zero", "grouped heads",
    "wide values", "narrow values", "more keys", "one query", "packed with padding", "segments of both sides",
    "positions of both sides", "positions and chunks", "bias", "bias of every head", "bias of every sequence", "one bias",
    "slopes per sequence", "sinks per head", "mask", "one mask", "mask of nothing", "mask function", "mask builder", "dropout",
    "bfloat16 with everything", "everything",
)  # fmt: skip
# Beside what has a test of its own below, these have every feature; the others show which one it is that fails.
FAST = (
    "everything", "bfloat16 with everything", "causal zigzag", "causal striped over four", "window of two sides", "chunks zigzag",
    "positions of both sides", "bias of every head", "mask of nothing", "one query",
)  # fmt: skip
FUSED = ("grouped heads", "slopes per sequence", "packed with padding", "causal zigzag")


@pytest.fixture(autouse=True)
def interpreter():
    with kernels_interpreted(lanes=8):
        yield


def in_pallas(case: Case, **settings) -> Case:
    """The case in blocks of 16, with no more heads and batch entries than it is about."""
    small = {"batch": 1} if not case.arrays and case.batch == 2 else {}
    return replace(
        case,
        block=16,
        ring=case.ring if "over" in case.name else min(case.ring, 2),
        settings={"platform": "pallas", **settings},
        quick_compile=True,
        **small,
    )


def against_the_oracle(case: Case) -> None:
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    results = ring_results(case, inputs, cotangents, check_vma=False)  # the interpreter has no types of shard_map
    assert_like_the_oracle(case, results, inputs, cotangents)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def some_slow(names: Iterable[str], fast: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in names]


@pytest.mark.wide
@pytest.mark.parametrize("name", some_slow(NAMES, FAST))
def test_against_the_oracle(name: str):
    against_the_oracle(in_pallas(named(name)))


@pytest.mark.wide
@pytest.mark.parametrize("name", some_slow(FUSED, ("grouped heads",)))
def test_fused_backward(name: str):
    against_the_oracle(in_pallas(named(name), fused_backward=True))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_may_hold_anything(layout: str, fused: bool):
    case = Case("padding", ring=2, layout=layout, queries=36, batch=1, heads=2, kv_heads=1, options=CAUSAL, arrays=PADDED | SLOPES)
    assert_padding_holds_anything(in_pallas(case, fused_backward=fused), check_vma=False)


@pytest.mark.parametrize("heads", [1, pytest.param("H", marks=pytest.mark.slow)])
def test_keys_that_a_mask_hides_from_every_query_may_hold_anything(heads):
    arrays = {"mask": HIDING(heads), "bias": normal(1, "H", "T", "S")}
    case = Case("hidden keys", ring=2, layout="zigzag", queries=10, keys=14, batch=1, heads=2, kv_heads=2, arrays=arrays)
    assert_padding_holds_anything(in_pallas(case), check_vma=False)


@pytest.mark.slow
def test_splash_masks_of_several_heads():
    """The kernel computes them itself, from the places in the sequence, though position ids say something else."""

    def builder(q_len, kv_len, heads, head, reps):
        shape = q_len, kv_len
        return splash.CausalMask(shape) & splash.LocalMask(shape, (7, None), 0) if head < 2 else splash.ChunkedCausalMask(shape, 12)

    ids = {"q_position_ids": lambda rng, case: np.arange(80, dtype=np.int32)[::-1].copy()}
    options = {"mask_builder": builder}
    against_the_oracle(in_pallas(Case("splash masks", ring=2, queries=40, layout="zigzag", options=options, arrays=ids)))


MORE_PAIRS = {
    "rounded logits": ShardPair(20, 20, scores=Scores(make_mask(), 0.3, logits_dtype="bfloat16"), dtype="bfloat16"),
    "fused, grouped": ShardPair(50, 40, heads=4, kv_heads=2, carry=True, fused=True),
    "the last pair in 16 bits": ShardPair(40, 40, carry=True, last=True, dtype="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some_slow(PAIRS | MORE_PAIRS, ("own shard of a zigzag", "striped", *MORE_PAIRS)))
def test_pairs(name: str):
    check(pallas, (PAIRS | MORE_PAIRS)[name], SMALL)


@pytest.mark.slow
def test_a_mask_function_is_what_it_was_when_it_was_given():
    """The backward's kernels are traced after the loop, when its variable has another value."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 24, 1, 8)) for i in range(3))

    def total(platform, q):
        found = 0.0
        for reach in (2, 9):
            out = jax_core.ring_attention(q, k, v, mask_mod=lambda b, h, i, j: jnp.abs(i - j) < reach, platform=platform)  # noqa: B023
            found = found + (out**2).sum()
        return found

    np.testing.assert_allclose(*(jax.grad(partial(total, platform))(q) for platform in ("pallas", "xla")), atol=1e-5)


@pytest.mark.slow
def test_with_64_bits_enabled():
    with jax.enable_x64(True):
        q, k, v = (jax.random.normal(jax.random.key(i), (1, 40, 2, 8), jnp.float32) for i in range(3))
        slopes = jnp.ones(2, jnp.float32)

        def gradient(platform):
            def total(q, slopes):
                return (jax_core.ring_attention(q, k, v, alibi_slopes=slopes, causal=True, platform=platform) ** 2).sum()

            return jax.grad(total, (0, 1))(q, slopes)

        for got, want in zip(gradient("pallas"), gradient("xla"), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)
        ids = jnp.zeros(40, jnp.int64)
        with pytest.raises(NotImplementedError, match="ids of 64 bits"):
            jax_core.ring_attention(q, k, v, q_segment_ids=ids, platform="pallas")


@pytest.mark.parametrize("precision", ["high", lax.Precision.HIGH, lax.DotAlgorithmPreset.BF16_BF16_F32])
def test_other_precisions_are_refused(precision):
    scores = Scores(make_mask(), 1.0, precision=precision)
    problem = Problem(scores, "float32", batch=1, q_length=16, k_length=16, heads=1, kv_heads=1, dim=8, value_dim=8)
    assert "one of the precisions" in (pallas.unsupported(problem, *SMALL) or "")


def test_long_lists_of_blocks_are_refused():
    x = jax.ShapeDtypeStruct((1, 2**14, 1, 16), jnp.float32)
    settings = dict(platform="pallas", cfg=jax_core.RingAttentionConfig(FwdParams(16, 16)))
    with pytest.raises(NotImplementedError, match="give larger blocks"):
        jax.eval_shape(lambda x: jax_core.ring_attention(x, x, x, **settings), x)


@pytest.mark.parametrize(
    ("settings", "dtype", "dim", "message"),
    [
        ({}, "float32", 257, "at most 256"),
        ({}, "float16", 16, "float16 .it takes bfloat16, float32"),
        ({"cfg": jax_core.RingAttentionConfig(FwdParams(24, 16))}, "float32", 16, "multiples of 8, got 24"),
        ({"cfg": jax_core.RingAttentionConfig(bwd_params=BwdParams(num_warps=4))}, "float32", 16, "no stages or warps"),
    ],
)
def test_what_it_refuses(settings, dtype, dim, message, monkeypatch):
    monkeypatch.setattr(params, "LANES", 16)
    x = jnp.ones((1, 16, 2, dim), dtype)
    with pytest.raises((NotImplementedError, ValueError), match=message.replace("of 8", "of 16")):
        jax_core.ring_attention(x, x, x, platform="pallas", **settings)
