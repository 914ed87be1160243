"""The oracle against what others say: torch, jax.nn, finite differences, and attention written as Python loops."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_cases import LazyMask, quick_compiles
from jax.test_util import check_grads

from jax_core.masks.dropout import keep_mask
from jax_core.testing.oracle import ReferenceOutput, reference_attention

SHAPES = {"B": 2, "T": 5, "S": 5, "H": 4, "Hkv": 2, "D": 3, "Dv": 2}


@pytest.fixture(autouse=True)
def float64_and_quick_compiles():
    with quick_compiles(), jax.enable_x64(True):
        yield


def random_qkv(rng: np.random.Generator, **changed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = SHAPES | changed
    query = rng.standard_normal((n["B"], n["T"], n["H"], n["D"]))
    key = rng.standard_normal((n["B"], n["S"], n["Hkv"], n["D"]))
    return query, key, rng.standard_normal((n["B"], n["S"], n["Hkv"], n["Dv"]))


def oracle(*arrays: Any, **options: Any) -> ReferenceOutput:
    return jax.jit(lambda *arrays: reference_attention(*arrays, **options))(*arrays)


# ----------------------------------------------------------------------------------------------------------- by hand


def test_two_keys_by_hand():
    """Logits 0 and ln 3 weigh the values 1/4 and 3/4."""
    query, key = np.ones((1, 1, 1, 1)), np.array([0.0, math.log(3.0)]).reshape(1, 2, 1, 1)
    value = np.array([[4.0, 0.0], [8.0, 4.0]]).reshape(1, 2, 1, 2)
    out, lse = oracle(query, key, value)
    np.testing.assert_allclose(out.ravel(), [7.0, 3.0])
    np.testing.assert_allclose(lse.ravel(), [math.log(4.0)])


def test_a_sink_takes_weight_and_gives_no_value():
    query, key = np.ones((1, 1, 1, 1)), np.array([0.0, math.log(3.0)]).reshape(1, 2, 1, 1)
    value = np.array([4.0, 8.0]).reshape(1, 2, 1, 1)
    out, lse = oracle(query, key, value, np.array([math.log(4.0)]))
    np.testing.assert_allclose(out.ravel(), [3.5])
    np.testing.assert_allclose(lse.ravel(), [math.log(8.0)])


def test_the_scale_is_one_over_root_dim_unless_given():
    query, key, value = np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 1))
    assert oracle(query, key, value).lse.item() == pytest.approx(2.0)
    assert oracle(query, key, value, softmax_scale=0.25).lse.item() == pytest.approx(1.0)
    assert oracle(query, key, value, softmax_scale=0.0).lse.item() == 0.0


def test_soft_cap_then_bias_then_slope():
    """x = 4 capped at 2, plus a bias of 10, minus a slope of 3 over a distance of 0."""
    query, key, value = (np.full((1, 1, 1, 1), 2.0) for _ in range(3))
    bias = np.full((1, 1, 1, 1), 10.0)
    lse = oracle(query, key, value, None, bias, logits_soft_cap=2.0, alibi_slopes=np.array([3.0])).lse.item()
    assert lse == pytest.approx(2.0 * math.tanh(2.0) + 10.0)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, ["111111"] * 6),
        ({"causal": True}, ["100000", "110000", "111000", "111100", "111110", "111111"]),
        ({"sliding_window": 1}, ["110000", "111000", "011100", "001110", "000111", "000011"]),
        ({"sliding_window": 1, "causal": True}, ["100000", "110000", "011000", "001100", "000110", "000011"]),
        ({"sliding_window": (2, 0)}, ["100000", "110000", "111000", "011100", "001110", "000111"]),
        ({"sliding_window": (-1, 1)}, ["110000", "111000", "111100", "111110", "111111", "111111"]),
        ({"sliding_window": (None, 1)}, ["110000", "111000", "111100", "111110", "111111", "111111"]),
        ({"sliding_window": 0}, ["100000", "010000", "001000", "000100", "000010", "000001"]),
        ({"chunk_size": 4}, ["100000", "110000", "111000", "111100", "000010", "000011"]),
        ({"chunk_size": 4, "sliding_window": 1}, ["100000", "110000", "011000", "001100", "000010", "000011"]),
        ({"q_segment_ids": np.array([[0, 0, 1, 1, -1, -1]])}, ["110000", "110000", "001100", "001100", "000000", "000000"]),
        (
            {"q_segment_ids": np.array([[0, 0, 1, 1, 1, 2]]), "kv_segment_ids": np.array([[0, 1, 1, -1, -1, 3]])},
            ["100000", "100000", "011000", "011000", "011000", "000000"],
        ),
        (
            {"causal": True, "q_position_ids": np.array([[0, 1, 2, 0, 1, 9]])},
            ["100100", "110110", "111110", "100100", "110110", "111111"],
        ),
        (
            {"causal": True, "kv_position_ids": np.array([5, 4, 3, 2, 1, 0])},
            ["111111", "011111", "001111", "000111", "000011", "000001"],
        ),
        (
            {"causal": True, "q_position_ids": np.arange(6) + 2, "kv_position_ids": np.arange(6) + 4},
            ["000000", "000000", "100000", "110000", "111000", "111100"],
        ),
        ({"mask_mod": lambda b, h, q, k: (q + k) % 3 == 0}, ["100100", "001001", "010010", "100100", "001001", "010010"]),
        ({"mask": np.tril(np.ones((1, 1, 6, 6), bool), -1)}, ["000000", "100000", "110000", "111000", "111100", "111110"]),
        (
            {"mask_builder": lambda q_len, kv_len, heads, head, reps: LazyMask((q_len, kv_len), lambda q, k: k == q // 2)},
            ["100000", "100000", "010000", "010000", "001000", "001000"],
        ),
    ],
)
def test_who_sees_whom_by_hand(options: dict[str, Any], seen: list[str]):
    """Equal logits and one-hot values make the output the row of the mask, evenly weighted."""
    zeros, value = np.zeros((1, 6, 1, 2)), np.eye(6).reshape(1, 6, 1, 6)
    out, lse = oracle(zeros, zeros, value, **options)
    expected = np.array([[int(mark) for mark in row] for row in seen])
    np.testing.assert_array_equal(np.asarray(out[0, :, 0]) > 0, expected)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(expected.sum(1)), atol=1e-15)


# ------------------------------------------------------------------------------------------------------- Python loops


def loop_attention(query, key, value, sinks=None, bias=None, *, slopes=None, cap=None, scale=1.0, keep=None, prob=0.0, sees=None):
    """Attention one pair at a time in Python floats. `sinks`: a list per head. `sees(b, h, i, j)`; `keep[b, h, i, j]`."""
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = query.shape, value.shape
    out, lse = np.zeros((batch, queries, heads, value_dim)), np.full((batch, heads, queries), -np.inf)
    for b, h, i in np.ndindex(batch, heads, queries):
        weights = {}
        for j in range(keys):
            group = h * kv_heads // heads
            x = scale * math.fsum(query[b, i, h, d] * key[b, j, group, d] for d in range(dim))
            x = x if cap is None else cap * math.tanh(x / cap)
            x += 0.0 if bias is None else bias[b % bias.shape[0], h % bias.shape[1], i, j]
            x -= 0.0 if slopes is None else slopes[h] * abs(i - j)
            if sees is None or sees(b, h, i, j):
                weights[j] = math.exp(x)
        total = math.fsum(weights.values()) + math.fsum(math.exp(sink) for sink in (sinks[h] if sinks else []))
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, weight in weights.items():
            kept = 1.0 if keep is None else keep[b, h, i, j] / (1.0 - prob)
            out[b, i, h] += weight / total * kept * value[b, j, h * kv_heads // heads]
    return out, lse


def _loop_cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each name: arguments of the oracle, and of the loops."""
    rng = np.random.default_rng(5)
    bias, narrow_bias = rng.standard_normal((2, 4, 5, 5)), rng.standard_normal((1, 1, 5, 5))
    sinks, slopes, mask = rng.standard_normal((4, 3)), rng.uniform(0.1, 1.0, 4), rng.random((2, 1, 5, 5)) < 0.6
    with jax.enable_x64(True):
        drawn = np.asarray(keep_mask(np.array([3, 4], np.uint32), *np.ogrid[:2, :4, :5, :5], 0.3))
    dropout = {"dropout_prob": 0.3, "dropout_seed": np.array([3, 4], np.uint32)}
    return {
        "plain": ({}, {}),
        "scale and cap": ({"softmax_scale": 0.7, "logits_soft_cap": 0.9}, {"scale": 0.7, "cap": 0.9}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "one bias for all": ({"bias": narrow_bias}, {"bias": narrow_bias}),
        "sink per head": ({"softmax_aux": sinks[:, 0]}, {"sinks": [[x] for x in sinks[:, 0]]}),
        "shared sinks": ({"softmax_aux": sinks[0]}, {"sinks": [list(sinks[0])] * 4}),
        "sinks per head": ({"softmax_aux": sinks}, {"sinks": sinks.tolist()}),
        "slopes": ({"alibi_slopes": slopes}, {"slopes": slopes}),
        "mask": ({"mask": mask}, {"sees": lambda b, h, i, j: mask[b, 0, i, j]}),
        "dropout": (dropout, {"keep": drawn, "prob": 0.3}),
        "mask function": (
            {"mask_mod": lambda b, h, q, k: (b + h + q * k) % 2 == 0},
            {"sees": lambda b, h, i, j: (b + h + i * j) % 2 == 0},
        ),
        "mask builder": (
            {"mask_builder": lambda t, s, heads, head, reps: LazyMask((t, s), lambda q, k: (q + k) % (reps + head) == 0)},
            {"sees": lambda b, h, i, j: (i + j) % (2 + h) == 0},
        ),
        "everything": (
            {"bias": bias, "softmax_aux": sinks, "alibi_slopes": slopes, "mask": mask, "causal": True, "sliding_window": 3}
            | {"logits_soft_cap": 2.0}
            | dropout,
            {"bias": bias, "sinks": sinks.tolist(), "slopes": slopes, "cap": 2.0, "keep": drawn, "prob": 0.3}
            | {"sees": lambda b, h, i, j: mask[b, 0, i, j] and j <= i <= j + 3},
        ),
    }


@pytest.mark.parametrize("name", list(_loop_cases()))
def test_against_python_loops(name: str):
    ours, theirs = _loop_cases()[name]
    query, key, value = random_qkv(np.random.default_rng(1))
    out, lse = oracle(query, key, value, **ours)
    expected_out, expected_lse = loop_attention(query, key, value, **({"scale": 3**-0.5} | theirs))
    np.testing.assert_allclose(out, expected_out, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-14)


def test_slopes_per_batch_and_position_ids():
    """Distances come from the position ids, and a slope may differ per sequence."""
    query, key, value = random_qkv(np.random.default_rng(2))
    slopes, ids = np.random.default_rng(3).uniform(0.1, 1.0, (2, 4)), np.array([[3, 0, 8, 1, 1], [0, 1, 2, 3, 4]])
    bias = -slopes[:, :, None, None] * np.abs(ids[:, None, :, None] - ids[:, None, None, :])
    ours = oracle(query, key, value, alibi_slopes=slopes, q_position_ids=ids)
    np.testing.assert_allclose(ours.out, oracle(query, key, value, None, bias).out, atol=1e-14)


# -------------------------------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias", "scale", "gqa"])
def test_against_torch(kind: str):
    """out and the gradients of torch's scaled_dot_product_attention in float64."""
    rng = np.random.default_rng(4)
    arrays = random_qkv(rng, S=7 if kind in ("mask", "bias") else 5, Hkv=2 if kind == "gqa" else 4)
    mask, bias = rng.random((2, 4, 5, 7)) < 0.6, rng.standard_normal((2, 4, 5, 7))
    mask[..., 0] = True
    cotangent = rng.standard_normal((2, 5, 4, 2))
    ours, theirs = {
        "plain": ({}, {}),
        "gqa": ({}, {"enable_gqa": True}),
        "scale": ({"softmax_scale": 0.2}, {"scale": 0.2}),
        "causal": ({"causal": True}, {"is_causal": True}),
        "mask": ({"mask": mask}, {"attn_mask": torch.from_numpy(mask)}),
        "bias": ({"bias": bias}, {"attn_mask": torch.from_numpy(bias)}),
    }[kind]
    tensors = [torch.from_numpy(array).transpose(1, 2).requires_grad_() for array in arrays]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **theirs)
    gradients = torch.autograd.grad(expected, tensors, torch.from_numpy(cotangent).transpose(1, 2))
    out, transpose = jax.vjp(lambda *qkv: oracle(*qkv, **ours).out, *arrays)
    np.testing.assert_allclose(out, expected.detach().transpose(1, 2), atol=1e-13)
    for ours_gradient, gradient in zip(transpose(cotangent), gradients, strict=True):
        np.testing.assert_allclose(ours_gradient, gradient.transpose(1, 2), atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"causal": True}, {"is_causal": True}),
        ({"sliding_window": (3, 2)}, {"local_window_size": (3, 2)}),
        ({"sliding_window": 2}, {"local_window_size": 2}),
        ({"sliding_window": 2, "causal": True}, {"local_window_size": 2, "is_causal": True}),
    ],
)
def test_against_jax_nn(ours: dict[str, Any], theirs: dict[str, Any]):
    rng = np.random.default_rng(6)
    query, key, value = random_qkv(rng, T=9, S=9, Dv=3)
    mask, bias = rng.random((2, 4, 9, 9)) < 0.8, rng.standard_normal((2, 4, 9, 9))
    mask |= np.eye(9, dtype=bool)
    expected = jax.nn.dot_product_attention(*map(jnp.asarray, (query, key, value, bias, mask)), **theirs)
    out = oracle(query, key, value, None, bias, mask=mask, **ours).out
    np.testing.assert_allclose(out, expected, atol=2e-7)  # jax.nn computes its softmax in float32


# ---------------------------------------------------------------------------------------------- gradients and errors


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(7)
    inputs = dict(zip(("query", "key", "value"), random_qkv(rng), strict=True))
    inputs |= {"softmax_aux": rng.standard_normal((4, 3)), "bias": rng.standard_normal((2, 1, 5, 5)), "alibi_slopes": np.ones(4)}
    options = {"causal": True, "sliding_window": 2, "logits_soft_cap": 1.5, "dropout_prob": 0.2}
    options["dropout_seed"] = np.array([1, 2], np.uint32)
    check_grads(lambda inputs: tuple(oracle(**inputs, **options)), (inputs,), order=1, modes=("rev",))


@pytest.mark.parametrize("spread", [1.0, 1000.0])
@pytest.mark.parametrize("sinks", [None, np.zeros(4)])
def test_a_row_that_sees_nothing(sinks: np.ndarray | None, spread: float):
    """Sequence 0 is all padding: out 0, lse -inf or that of the sinks, gradients 0 and never NaN."""
    query, key, value = (spread * array for array in random_qkv(np.random.default_rng(8)))
    ids = np.array([[-1] * 5, [0] * 5])

    def attend(query, key, value):
        return tuple(oracle(query, key, value, sinks, q_segment_ids=ids))

    (out, lse), transpose = jax.vjp(attend, query, key, value)
    gradients = transpose((np.ones(out.shape), np.ones(lse.shape)))
    assert not np.any(out[0])
    assert not any(np.any(gradient[0]) for gradient in gradients)
    assert all(np.all(np.isfinite(array)) for array in (out, *gradients))
    np.testing.assert_array_equal(lse[0], np.full((4, 5), -np.inf if sinks is None else 0.0))


def test_a_bias_of_minus_infinity_hides():
    query, key, value = random_qkv(np.random.default_rng(9))
    mask = np.random.default_rng(10).random((2, 4, 5, 5)) < 0.5
    mask[0, :, 2] = False
    bias = np.where(mask, 0.0, -np.inf)
    hidden, masked = oracle(query, key, value, None, bias), oracle(query, key, value, mask=mask)
    np.testing.assert_allclose(hidden.out, masked.out, atol=1e-14)
    np.testing.assert_allclose(hidden.lse, masked.lse, atol=1e-14)
    gradient = jax.grad(lambda bias: oracle(query, key, value, None, bias).out.sum())(bias)
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[~mask])


def test_what_it_refuses():
    query, key, value = random_qkv(np.random.default_rng(11), S=6)
    with pytest.raises(ValueError, match=r"segment ids of one side .* got 5 queries and 6 keys"):
        oracle(query, key, value, q_segment_ids=np.zeros((2, 5), int))
    with pytest.raises(ValueError, match="position ids of one side"):
        oracle(query, key, value, kv_position_ids=np.arange(6))
    with jax.enable_x64(False), pytest.raises(ValueError, match="needs x64"):
        oracle(query, key, value, dtype="float64")


def test_the_dtype_is_the_one_asked_for():
    query, key, value = random_qkv(np.random.default_rng(12))
    assert {array.dtype for array in oracle(query, key, value, dtype="float32")} == {jnp.dtype("float32")}
    assert {array.dtype for array in oracle(query, key, value)} == {jnp.dtype("float64")}
    with jax.enable_x64(False):
        assert {array.dtype for array in oracle(query, key, value)} == {jnp.dtype("float32")}
