"""jax_core.ring_attention against the float64 oracle: forward, LSE and every gradient, on rings of CPU devices."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BIAS,
    CASES,
    CAUSAL,
    DROPOUT,
    EVERYTHING,
    PACKED,
    SEED,
    SINKS,
    Case,
    booleans,
    make_cotangents,
    make_inputs,
    oracle_results,
    over,
    ring_mesh,
    ring_output,
    ring_results,
    small_blocks,
)
from jax.extend.random import threefry_2x32 as jax_threefry
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle_assertions import assert_like_the_oracle, assert_ring_is_like_the_oracle, root_mean_square

import jax_core
from jax_core.masks.dropout import keep_mask, seed_words, threefry_2x32
from jax_core.testing.oracle import reference_attention


@over(CASES)
def test_against_the_oracle(case: Case):
    assert_ring_is_like_the_oracle(case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_error_does_not_grow_with_the_ring(layout: str):
    """The same sequence on rings of 1, 2, 4 and 8: each against the same bound."""
    case = Case("growing ring", quick_compile=False, queries=96, batch=1, heads=2, kv_heads=1, layout=layout, options=CAUSAL)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    for ring in (1, 2, 4, 8):
        split = replace(case, ring=ring, queries=96 // ring)
        assert_like_the_oracle(split, ring_results(split, inputs, cotangents), inputs, cotangents)


@pytest.mark.slow
def test_everything_without_check_vma():
    inputs, cotangents = make_inputs(EVERYTHING), make_cotangents(EVERYTHING)
    assert_like_the_oracle(EVERYTHING, ring_results(EVERYTHING, inputs, cotangents, check_vma=False), inputs, cotangents)


# --------------------------------------------------------------------------------------------------------- empty rows


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks: bool):
    """Padding queries: out 0, LSE -inf or the sinks' own, gradients exactly 0, and exactly none from or to padding keys."""
    case = Case("empty rows", ring=2, layout="zigzag", arrays=PACKED | (SINKS if sinks else {}))
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    got = ring_results(case, inputs, cotangents)
    padding = inputs["q_segment_ids"] < 0
    assert padding.any()
    for name in ("out", "d_query", "d_key", "d_value"):
        assert not np.any(got[name][padding]), name
    lse = got["lse"].transpose(0, 2, 1)[padding]
    np.testing.assert_allclose(lse, np.broadcast_to(inputs["softmax_aux"] if sinks else -np.inf, lse.shape), rtol=1e-6)


@pytest.mark.slow
def test_a_bias_of_minus_infinity_hides():
    """-inf in the bias is a mask, also where it covers whole rows and blocks, and in the gradients. A sink of -inf is none."""
    case = Case("bias of minus infinity", ring=2, layout="striped", arrays=BIAS | SINKS)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    hidden = booleans("B", "H", "T", "S", density=0.4)(np.random.default_rng(0), case)
    hidden[:, :, 5:9] = True
    hidden[0, :, :, :24] = True
    inputs["bias"] = np.where(hidden, -np.inf, inputs["bias"]).astype(np.float32)
    inputs["softmax_aux"][1] = -np.inf
    got = ring_results(case, inputs, cotangents)
    assert_like_the_oracle(case, got, inputs, cotangents)
    assert not np.any(got["d_bias"][hidden])


@pytest.mark.slow
@pytest.mark.parametrize("fill", [-1e30, np.finfo(np.float32).min])
def test_a_bias_of_very_negative_numbers(fill: float):
    """What additive masks hold. A row where all keys have it averages them; no NaN."""
    case = Case("very negative bias", ring=2, queries=10, arrays=BIAS)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    hidden = booleans("B", "H", "T", "S", density=0.4)(np.random.default_rng(0), case)
    hidden[:, :, 5:9] = True
    inputs["bias"] = np.where(hidden, fill, inputs["bias"]).astype(np.float32)
    got = ring_results(case, inputs, cotangents)
    assert not any(np.isnan(array).any() for array in got.values())
    rows = np.delete(np.arange(20), np.s_[5:9])
    exact = oracle_results(case, inputs, cotangents)
    for name, axis in (("out", 1), ("lse", 2), ("d_query", 1)):
        np.testing.assert_allclose(got[name].take(rows, axis), exact[name].take(rows, axis), atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_huge_logits_overflow_nothing():
    case = Case("huge logits", ring=4, queries=12, layout="zigzag", spread=1e4, options=CAUSAL)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    got, exact = ring_results(case, inputs, cotangents), oracle_results(case, inputs, cotangents)
    for name in ("out", "lse", "d_value"):
        np.testing.assert_allclose(got[name], exact[name], rtol=1e-2, atol=1e-2, err_msg=name)
    assert all(np.isfinite(array).all() for array in got.values())


# ------------------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize(("ring", "layout"), [pytest.param(1, "contiguous", marks=pytest.mark.slow), (2, "zigzag"), (4, "striped")])
def test_the_same_weights_fall_on_every_ring_and_layout(ring: int, layout: str):
    """With queries of zero and one-hot values the output shows which weights were kept: exactly those of keep_mask."""
    length, prob = 48, 0.4
    case = Case("kept", ring=ring, layout=layout, queries=length // ring, block=8, value_dim=length, options={"dropout_prob": prob})
    inputs = make_inputs(replace(case, arrays=SEED)) | {"query": np.zeros((2, length, 4, 8), np.float32)}
    inputs["value"] = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], (2, length, 4, length)).copy()
    out = ring_output(case, inputs)
    keep = np.asarray(keep_mask(np.array([7, 11], np.uint32), *np.ogrid[:2, :4, :length, :length], prob))
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) > 0, keep)
    np.testing.assert_allclose(out[out > 0], 1 / (1 - prob) / length, rtol=1e-5)


@pytest.mark.slow
def test_two_runs_are_bit_equal():
    case = Case(
        "twice", ring=4, quick_compile=False, layout="zigzag", queries=18, options=DROPOUT | CAUSAL, arrays=SEED | BIAS | SINKS
    )
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    first, second = (ring_results(case, inputs, cotangents) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def small_inputs(length: int = 16) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)
    return tuple(jnp.asarray(rng.standard_normal((1, length, 2, 4)), jnp.float32) for _ in range(3))  # type: ignore[return-value]


def dropped(seed: Any, prob: float = 0.5) -> jax.Array:
    return jax_core.ring_attention(*small_inputs(), dropout_prob=prob, dropout_seed=seed)


def test_seeds():
    """An int is its two words, low first; a new seed is a new pattern, in either word; a traced seed is the same as a plain one."""
    pair = dropped(np.array([5, 9], np.uint32))
    np.testing.assert_array_equal(pair, dropped(5 + (9 << 32)))
    np.testing.assert_allclose(pair, jax.jit(dropped)(jnp.array([5, 9], jnp.uint32)), atol=1e-6)
    np.testing.assert_allclose(dropped(5), jax.jit(dropped)(jnp.uint32(5)), atol=1e-6)
    for seed, same in ((5, jnp.int32(5)), (5, np.int64(5)), (-1, jnp.int32(-1))):
        np.testing.assert_array_equal(dropped(seed), dropped(same))
    outputs = [np.asarray(dropped(seed)) for seed in (0, 1, 2, 1 << 32, -1)] + [np.asarray(dropped(0, 0.0))]
    assert all(np.any(a != b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_seed_words():
    for seed in (0, 1, 2**31, 2**32 + 3, 2**63 + 5, -1, -(2**40)):
        words = np.asarray(seed_words(seed))
        assert words.dtype == np.uint32
        assert int(words[0]) | int(words[1]) << 32 == seed % 2**64
    with jax.enable_x64(True):
        np.testing.assert_array_equal(seed_words(jnp.int64(-5)), seed_words(-5))
    for wrong in (1.5, np.zeros(3, np.uint32), np.zeros(2)):
        with pytest.raises(ValueError, match="dropout_seed must be an int"):
            seed_words(wrong)


def test_no_dropout_needs_no_seed_and_ignores_none():
    np.testing.assert_array_equal(dropped(None, 0.0), jax_core.ring_attention(*small_inputs()))


def test_threefry_known_answers():
    """Random123's vectors, and the same words as JAX's own."""
    for key, counter, answer in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        assert tuple(int(word) for word in threefry_2x32(key, counter)) == answer
    key, counter = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.arange(64, dtype=np.uint32)
    ours = np.concatenate(threefry_2x32(tuple(key), (counter[:32], counter[32:])))
    np.testing.assert_array_equal(ours, jax_threefry(jnp.asarray(key), jnp.asarray(counter)))


@pytest.mark.parametrize("prob", [0.05, 0.3, 0.9])
def test_kept_weights_are_bernoulli(prob: float):
    """The share kept, over all and over every batch, head, row and column, and no correlation of neighbours, within 5 sigma."""
    shape = (3, 4, 96, 96)
    keep = np.asarray(keep_mask(np.array([1, 2], np.uint32), *np.ogrid[tuple(map(slice, shape))], prob)).astype(float) - (1 - prob)
    variance = prob * (1 - prob)
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        count = np.prod([shape[axis] for axis in axes])
        assert np.max(np.abs(keep.mean(axes))) < 5 * (variance / count) ** 0.5
    for axis in range(4):
        first, second = np.delete(keep, 0, axis), np.delete(keep, -1, axis)
        assert abs((first * second).mean()) < 5 * variance / first.size**0.5
    assert abs((keep * keep.swapaxes(2, 3))[..., np.triu_indices(96, 1)[0], np.triu_indices(96, 1)[1]].mean()) < 5 * variance / 170


# ----------------------------------------------------------------------------------------------------------- mask_info


def test_mask_info_is_mask_and_segments_in_one():
    case = Case("mask info", ring=2, queries=12, arrays=PACKED | {"mask": booleans(1, 1, "T", "S")})
    inputs = make_inputs(case)
    query, key, value, mask, ids = (inputs[name] for name in ("query", "key", "value", "mask", "q_segment_ids"))
    wanted = jax.jit(lambda *qkv: reference_attention(*qkv, mask=mask, q_segment_ids=ids))(query, key, value)
    info = jax_core.MaskInfo(attention_mask=mask, q_segment_ids=ids, kv_segment_ids=ids, sequence_axis_name="ring")
    out, lse = jax_core.ring_attention(query, key, value, mask_info=info, mesh=ring_mesh(2), return_lse=True)
    np.testing.assert_allclose(out, wanted.out, atol=1e-6)
    np.testing.assert_allclose(lse, wanted.lse, atol=1e-6)


@pytest.mark.slow
def test_mask_info_names_the_axis_inside_shard_map():
    query, key, value = small_inputs()

    def attend(query, key, value):
        return jax_core.ring_attention(query, key, value, mask_info=jax_core.MaskInfo(sequence_axis_name="ring"), causal=True)

    specs = P(None, "ring")
    out = jax.jit(jax.shard_map(attend, mesh=ring_mesh(2), in_specs=(specs,) * 3, out_specs=specs))(query, key, value)
    np.testing.assert_allclose(out, reference_attention(query, key, value, causal=True).out, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- shapes and types


@pytest.mark.parametrize("ring", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_short_shapes_broadcast(ring: int):
    """A mask of [T, S], a bias of [H, 1, S], ids of [T] and slopes of [1, H] mean what NumPy's broadcasting says."""
    query, key, value = small_inputs()
    rng = np.random.default_rng(4)
    mask, bias, ids = rng.random((16, 16)) < 0.8, rng.standard_normal((2, 1, 16)).astype(np.float32), np.repeat([0, 1], 8)
    slopes = rng.uniform(0, 1, (1, 2)).astype(np.float32)

    def ours(bias, slopes):
        options = {"mask": mask, "q_segment_ids": ids, "alibi_slopes": slopes, "mesh": ring_mesh(ring)}
        return (jax_core.ring_attention(query, key, value, None, bias, **options) ** 2).sum()

    def theirs(bias, slopes):
        bias = jnp.broadcast_to(bias, (1, 2, 16, 16))
        out = reference_attention(query, key, value, None, bias, mask=mask, q_segment_ids=ids[None], alibi_slopes=slopes[0]).out
        return (out**2).sum()

    got, wanted = (jax.jit(jax.value_and_grad(loss, (0, 1)))(bias, slopes) for loss in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


def test_gradients_of_what_is_broadcast_are_summed_before_they_are_rounded():
    """A bfloat16 bias that 512 rows share: its gradient is rounded once, and not once per row."""
    rng = np.random.default_rng(6)
    *qkv, weights = (jnp.asarray(rng.standard_normal((1, 512, 2, 4)), jnp.float32) for _ in range(4))
    bias = jnp.asarray(rng.standard_normal((2, 1, 512)), jnp.bfloat16)

    def gradient(attend, bias):
        return jax.jit(jax.grad(lambda bias, *qkv: (attend(*qkv, None, bias) * (weights + 1)).sum()))(bias, *qkv)

    got = gradient(jax_core.ring_attention, bias).astype(jnp.float32)
    wanted = gradient(lambda *arrays: reference_attention(*arrays).out, bias.astype(jnp.float32))
    error, rounding = got - wanted, wanted.astype(jnp.bfloat16).astype(jnp.float32) - wanted
    assert root_mean_square(error) <= 2 * root_mean_square(rounding)


@pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("uint8", "int16", "uint16")), "int64"]
)
def test_ids_of_every_integer_type(dtype: str):
    """Small and unsigned types neither wrap round nor fail to travel: positions up to 250, a window wider than the type."""
    query, key, value = small_inputs()
    ids = (np.arange(16) * (7 if dtype == "int8" else 16)).astype(dtype)[None]
    options: dict[str, Any] = {"sliding_window": (200, 100), "q_position_ids": ids, "q_segment_ids": (ids > 30).astype(dtype)}
    if dtype != "int8":
        options["alibi_slopes"] = np.array([0.01, 0.02], np.float32)
    with jax.enable_x64(dtype == "int64"):
        out = jax_core.ring_attention(query, key, value, mesh=ring_mesh(2), **options)
    wide = {name: x.astype(np.int32) if name.endswith("ids") else x for name, x in options.items()}
    wanted = jax.jit(lambda *qkv: reference_attention(*qkv, **wide).out)(query, key, value)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize("dtypes", [("int64", "int64"), ("int64", "int32")], ids="-".join)
def test_a_mask_function_of_wide_position_ids(dtypes: tuple[str, str]):
    """Traced for positions of 32 bits, with an array that it closes over, a constant of 32 bits, and both sides together."""
    query, key, value = small_inputs()
    ids = np.arange(16)[::-1]
    last = jnp.full(16, 9, jnp.int32)
    positions = dict(zip(("q_position_ids", "kv_position_ids"), map(ids.astype, dtypes), strict=True))

    def mask_mod(batch, head, q, k):
        return (k <= q) & (k <= last[q]) & (jnp.where(q > 3, q, jnp.int32(0)) >= k)

    @jax.jit
    def results(positions):
        out, transpose = jax.vjp(lambda *qkv: jax_core.ring_attention(*qkv, mask_mod=mask_mod, **positions), query, key, value)
        return out, transpose(jnp.ones_like(out))

    wanted = results({name: x.astype(np.int32) for name, x in positions.items()})
    with jax.enable_x64(True):
        jax.tree.map(np.testing.assert_array_equal, results(positions), wanted)
        on_ring = jax_core.ring_attention(query, key, value, mask_mod=mask_mod, mesh=ring_mesh(2), **positions)
    np.testing.assert_allclose(on_ring, wanted[0], atol=1e-6)


def test_a_mask_function_takes_positions_of_32_bits():
    query, key, value = small_inputs()
    with jax.enable_x64(True), pytest.raises(ValueError, match="q_position_ids has values from 0 to 2147483648"):
        jax_core.ring_attention(query, key, value, mask_mod=lambda b, h, q, k: k <= q, q_position_ids=np.array([0] * 15 + [2**31]))


TRANSFORMED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "grad": lambda f: jax.jit(jax.value_and_grad(f)),
    "scan": lambda f: lambda q: jax.lax.scan(lambda _, x: (None, f(x)), None, q[None])[1],
    "vmap": lambda f: lambda q: jax.vmap(f)(q[None]),
    "cond": lambda f: lambda q: jax.lax.cond(q.sum() < jnp.inf, f, f, q),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_long_position_ids_that_a_traced_function_closes_over(name: str):
    """Beside a mask function, whose positions have 32 bits: they are converted, and refused where their values do not fit."""
    transform = TRANSFORMED[name]

    def attend(ids: Any) -> Any:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sin(jax_core.ring_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j, q_position_ids=ids)).sum()

        return loss

    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 4)), jnp.float32)
        short, numbers = jnp.arange(8, dtype=jnp.int32)[::-1], np.arange(8)[::-1]
        wanted = transform(attend(short))(x)
        for ids in (jnp.asarray(numbers), numbers):
            assert ids.dtype == np.int64
            jax.tree.map(np.testing.assert_array_equal, transform(attend(ids))(x), wanted)
            with pytest.raises(ValueError, match="takes positions of 32 bits: q_position_ids has values from 4294967296"):
                transform(attend(ids + 2**32))(x)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_sinks_slopes_and_bias_keep_their_own_dtype(dtype: str):
    """They need not have the query's; each gradient comes back in its operand's dtype."""
    query, key, value = small_inputs()
    rng = np.random.default_rng(5)
    sinks, slopes, bias = (jnp.asarray(rng.uniform(0, 1, shape), dtype) for shape in ((2,), (2,), (1, 2, 16, 16)))

    def loss(sinks, slopes, bias, attend=jax_core.ring_attention, **more):
        return (attend(query, key, value, sinks, bias, alibi_slopes=slopes, **more) ** 2).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(sinks, slopes, bias)
    wanted = jax.jit(jax.grad(partial_out(loss), (0, 1, 2)))(*(array.astype(jnp.float32) for array in (sinks, slopes, bias)))
    assert [array.dtype for array in got] == [jnp.dtype(dtype)] * 3
    for ours, exact in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours.astype(np.float32), exact, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-5)


def partial_out(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: loss(*arrays, attend=lambda *args, **more: reference_attention(*args, **more).out)


# ----------------------------------------------------------------------------------------------------------- bad input

X = np.zeros((2, 8, 4, 6), np.float32)
QKV = (X, X, X)
RING = {"mesh": "ring", "axis_name": "ring"}


def shaped(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


MASK_8, IDS_8 = shaped(1, 1, 8, 8, dtype="bool"), shaped(2, 8, dtype="int32")

# fmt: off
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "rank of query": ((X[0], X, X), {}, r"query must be \[batch, seq, heads, dim\].*\(8, 4, 6\)"),
    "rank of value": ((X, X, X[..., 0]), {}, r"value must be .*\(2, 8, 4\)"),
    "no heads": ((X[:, :, :0], X, X), {}, r"query must have heads and a head dim.*\(2, 8, 0, 6\)"),
    "batch": ((X[:1], X, X), {}, r"batch.*\(1, 8, 4, 6\)"),
    "heads that do not divide": ((X[:, :, :3], X[:, :, :2], X[:, :, :2]), {}, r"multiple of key/value heads.*\(2, 8, 3, 6\)"),
    "fewer query heads": ((X[:, :, :2], X, X), {}, r"multiple of key/value heads"),
    "heads of key and value": ((X, X, X[:, :, :2]), {}, r"key and value must share.*\(2, 8, 2, 6\)"),
    "length of key and value": ((X, X, X[:, :4]), {}, r"key and value must share.*\(2, 4, 4, 6\)"),
    "head dims": ((X, X[..., :5], X), {}, r"head dim.*\(2, 8, 4, 5\)"),
    "mixed dtypes": ((X, X.astype(np.float16), X), {}, r"dtype.*float32, float16, float32"),
    "integer query": ((X.astype(np.int32),) * 3, {}, r"query must be of dtype .*float32.* got int32"),
    "unknown layout": (QKV, {"layout": "spiral"}, r"layout must be one of contiguous, .* got 'spiral'"),
    "odd zigzag": ((X[:, :6], X, X), {"layout": "zigzag"} | RING, r"zigzag .* .* divisible by 4, got 6 of the query"),
    "odd zigzag keys": ((X, X[:, :6], X[:, :6]), {"layout": "zigzag"} | RING, r"zigzag .* .* by 4, got 6 of the key"),
    "unknown platform": (QKV, {"platform": "abacus"}, r"platform must be one of .*xla.* got 'abacus'"),
    "two platforms": (QKV, {"platform": "triton", "cfg": {"platform": "xla"}}, r"platform.*differ"),
    "dropout without seed": (QKV, {"dropout_prob": 0.1}, r"dropout_prob > 0 needs a dropout_seed"),
    "dropout of all": (QKV, {"dropout_prob": 1.0, "dropout_seed": 1}, r"dropout_prob must be in \[0, 1\), got 1"),
    "negative dropout": (QKV, {"dropout_prob": -0.1, "dropout_seed": 1}, r"dropout_prob must be in \[0, 1\), got -0.1"),
    "seed of floats": (QKV, {"dropout_prob": 0.1, "dropout_seed": 0.5}, r"dropout_seed must be an int"),
    "mask shape": (QKV, {"mask": shaped(2, 4, 8, 7, dtype="bool")}, r"mask must .*\[2, 4, 8, 8\].*\(2, 4, 8, 7\)"),
    "mask of keys of a shard": (QKV, {"mask": shaped(1, 1, 8, 4, dtype="bool")} | RING, r"mask must .*\(1, 1, .*4\)"),
    "mask of floats": (QKV, {"mask": shaped(1, 1, 8, 8)}, r"mask must be of dtype bool; got float32"),
    "bias shape": ((X, X, X, None, shaped(3, 4, 8, 8)), {}, r"bias must .*\[2, 4, 8, 8\].*\(3, 4, 8, 8\)"),
    "bias of bools": ((X, X, X, None, MASK_8), {}, r"bias must be of dtype .*got bool"),
    "sinks of other heads": ((X, X, X, shaped(3, 2)), {}, r"softmax_aux must be .*4 heads; got shape \(3, 2\)"),
    "sinks of rank 3": ((X, X, X, shaped(4, 2, 1)), {}, r"softmax_aux must be .*got shape \(4, 2, 1\)"),
    "no sinks": ((X, X, X, shaped(0)), {}, r"softmax_aux must be .*got shape \(0,\)"),
    "slopes": (QKV, {"alibi_slopes": shaped(3)}, r"alibi_slopes must have shape \[4\] or .*got \[3\]"),
    "segments shape": (QKV, {"q_segment_ids": shaped(2, 7, dtype="int32")}, r"q_segment_ids must have shape .*\[2, 8\]; got "),
    "segments of floats": (QKV, {"q_segment_ids": shaped(2, 8)}, r"q_segment_ids must be of dtype .*got float32"),
    "one side of segments": ((X, X[:, :4], X[:, :4]), {"q_segment_ids": IDS_8}, r"kv_segment_ids.*8 and 4"),
    "one side of positions": ((X, X[:, :4], X[:, :4]), {"kv_position_ids": np.arange(4)}, r"q_position_ids.*8 and 4"),
    "negative window": (QKV, {"sliding_window": -2}, r"sliding_window sides must be >= 0.*got -2"),
    "window of three": (QKV, {"sliding_window": (1, 2, 3)}, r"sliding_window must be an int, a pair .*\(1, 2, 3\)"),
    "window of a float": (QKV, {"sliding_window": 2.5}, r"sliding_window must be an int.*2.5"),
    "chunk of nothing": (QKV, {"chunk_size": 0}, r"chunk_size must be a positive int or None, got 0"),
    "cap of nothing": (QKV, {"logits_soft_cap": 0.0}, r"logits_soft_cap must be positive"),
    "scale of nan": (QKV, {"softmax_scale": float("nan")}, r"softmax_scale must be finite, got nan"),
    "mask function": (QKV, {"mask_mod": "causal"}, r"mask_mod must be a function, got 'causal'"),
    "mask function that branches": (QKV, {"mask_mod": lambda b, h, q, k: k <= q and q > 2}, r"mask_mod is traced by JAX"),
    "mask function of numbers": (QKV, {"mask_mod": lambda b, h, q, k: q - k}, r"mask_mod must return one boolean"),
    "mask builder of numbers": (QKV, {"mask_builder": lambda *sizes: np.zeros((8, 8))}, r"mask_builder must return .*float64"),
    "mask builder too small": (QKV, {"mask_builder": lambda *sizes: np.ones((8, 7), bool)}, r"mask_builder .*\(8, 7\)"),
    "mask twice": (QKV, {"mask": MASK_8, "mask_info": "mask"}, r"mask came both in mask_info and by name"),
    "segments twice": (QKV, {"q_segment_ids": IDS_8, "mask_info": "segments"}, r"q_segment_ids came both"),
    "mask_info of another type": (QKV, {"mask_info": {"mask": None}}, r"mask_info must be a jax_core.MaskInfo, got dict"),
    "mesh without the axis": (QKV, {"mesh": "ring", "axis_name": "sp"}, r"mesh has axes \('ring',\); 'sp' is not among them"),
    "mesh of another type": (QKV, {"mesh": 4}, r"mesh must be a jax.sharding.Mesh, got int"),
    "mesh of two axes and no name": (QKV, {"mesh": "two axes"}, r"which axis of the mesh is the ring\?.*\('data', 'ring'\)"),
    "axis and no shard_map": (QKV, {"axis_name": "ring"}, r"axis_name='ring' must be an axis of the shard_map around"),
    "specs and no mesh": (QKV, {"in_specs": (P(),) * 3}, r"in_specs and out_specs .*mesh"),
    "a spec too many": ((X, X, X), RING | {"in_specs": (P(),) * 8}, r"in_specs must be 3 to 7 PartitionSpecs"),
    "spec of split dims": ((X, X, X), RING | {"in_specs": (P(None, None, None, "ring"),) * 3}, r"head dim must not be split"),
    "specs that disagree": ((X, X, X), RING | {"in_specs": (P(None, "ring"), P(), P())}, r"in_specs has key as .* it must be"),
    "length that does not divide": ((X[:, :7], X[:, :7], X[:, :7]), RING, r"7"),
    "config of another type": (QKV, {"cfg": {"fwd_params": 3}}, r"fwd_params must be FwdParams"),
    "block of nothing": (QKV, {"cfg": {"block": 0}}, r"q_blocksize must be a positive int or None, got 0"),
}
# fmt: on


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str):
    arrays, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax_core.ring_attention(*arrays, **{option: _built(option, value) for option, value in options.items()})


def _built(option: str, value: Any) -> Any:
    """Meshes and configs are made when the test runs and not when it is collected, which must start no backend."""
    if option == "mesh" and isinstance(value, str):
        return ring_mesh(2) if value == "ring" else Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "ring"))
    if option == "cfg":
        return small_blocks(value["block"]) if "block" in value else jax_core.RingAttentionConfig(**value)
    if option == "mask_info" and isinstance(value, str):
        ids, mask = shaped(2, 8, dtype="int32"), shaped(1, 1, 8, 8, dtype="bool")
        return jax_core.MaskInfo(attention_mask=mask) if value == "mask" else jax_core.MaskInfo(None, ids, ids)
    return value


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap", "dropout_prob"])
def test_a_traced_number_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be a Python number"):
        jax.jit(lambda number: jax_core.ring_attention(*small_inputs(), dropout_seed=1, **{name: number}))(0.5)


def test_the_signature_is_the_reference_designs():
    """Names, order and defaults that users of the design rely on."""
    parameters = inspect.signature(jax_core.ring_attention).parameters
    assert list(parameters)[:5] == ["query", "key", "value", "softmax_aux", "bias"]
    defaults = {"mask_info": None, "mask_builder": None, "sliding_window": None, "chunk_size": None, "causal": False}
    defaults |= {"logits_soft_cap": None, "softmax_scale": None, "axis_name": None, "fused_backward": False, "platform": None}
    defaults |= {"cfg": None, "mesh": None, "in_specs": None, "out_specs": None, "layout": "contiguous", "return_lse": False}
    for name, default in defaults.items():
        assert parameters[name].default == default, name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    config = jax_core.RingAttentionConfig()
    assert (config.fwd_params.q_blocksize, config.fwd_params.kv_blocksize) == (None, None)  # the kernel's own


@pytest.mark.parametrize(
    ("platform", "reason"), [("triton", "need an NVIDIA GPU"), ("cuda", "float32 .it takes bfloat16, float16"), ("pallas", "TPU")]
)
def test_a_named_kernel_that_cannot_says_why(platform: str, reason: str):
    with pytest.raises(NotImplementedError, match=f'platform="{platform}": .*{reason}.*use platform="auto"'):
        jax_core.ring_attention(*small_inputs(), platform=platform)


def test_settings_that_the_kernel_lacks_are_refused():
    cfg = jax_core.RingAttentionConfig(bwd_params=jax_core.BwdParams(num_warps=4))
    with pytest.raises(NotImplementedError, match="no stages or warps"):
        jax_core.ring_attention(*small_inputs(), cfg=cfg)
    with pytest.raises(ValueError, match=r'backend "tpu", but this program runs on "cpu"'):
        jax_core.ring_attention(*small_inputs(), cfg=jax_core.RingAttentionConfig(backend="tpu"))


@pytest.mark.parametrize(("precision", "name"), [(None, "HIGHEST"), ("high", "HIGH"), (jax.lax.Precision.DEFAULT, "DEFAULT")])
def test_a_precision_reaches_the_products(precision, name: str):
    program = jax.make_jaxpr(lambda *x: jax_core.ring_attention(*x, precision=precision))(*small_inputs())
    assert set(re.findall(r"Precision\.(\w+)", str(program))) == {name}


def test_a_precision_is_one_name():
    for wrong in (("high", "default"), "exact"):
        with pytest.raises(ValueError, match=r"precision must be a jax\.lax\.Precision or its name"):
            jax_core.ring_attention(*small_inputs(), precision=wrong)
