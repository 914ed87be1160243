"""platform="cuda": what it refuses and why, JAX's private calls gone or changed, and the ring over cuDNN's calls, which a stand-in
in plain XLA replaces here: same shapes, dtypes and roundings."""

import types
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CAUSAL,
    SINKS,
    Case,
    make_cotangents,
    make_inputs,
    oracle_results,
    over,
    ring_mesh,
    ring_results,
)
from jax.sharding import PartitionSpec as P
from oracle_assertions import assert_like_the_oracle, assert_ring_is_like_the_oracle, finite, root_mean_square

import jax_core
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import cudnn
from jax_core.kernels.contract import Problem, Scores
from jax_core.kernels.cudnn import calls, kernel
from jax_core.kernels.triton import launch
from jax_core.masks.static import make_mask
from jax_core.options import Options
from jax_core.request import hardware
from jax_core.request.dispatch import choose
from jax_core.request.features import of_scores, refusal

# ------------------------------------------------------------------------------------------------------- what it refuses

SCORES = Scores(make_mask(causal=True), 0.125)
PROBLEM = Problem(SCORES, "bfloat16", 2, 256, 256, 8, 2, 128, 128, backend="gpu", capability=90)
RING = replace(PROBLEM, layout="zigzag", size=4)


def scored(problem: Problem = PROBLEM, **changes: Any) -> Problem:
    return replace(problem, scores=replace(problem.scores, **changes))


def masked(problem: Problem = PROBLEM, **arguments: Any) -> Problem:
    return scored(problem, mask=make_mask(**arguments))


TAKEN = {
    "causal": PROBLEM,
    "full": masked(),
    "float16": replace(PROBLEM, dtype="float16"),
    "wide heads": replace(PROBLEM, dim=256, value_dim=256),
    "other value dim": replace(PROBLEM, dim=192, value_dim=128),
    "cross": masked(replace(PROBLEM, k_length=300)),
    "causal over fewer keys": replace(PROBLEM, k_length=100),
    "window": masked(causal=True, window=16),
    "window over more keys": masked(replace(PROBLEM, k_length=300), causal=True, window=16),
    "window of everything": masked(RING, causal=True, window=1023),
    "zigzag": RING,
    "contiguous": replace(RING, layout="contiguous"),
    "striped, all visible": masked(replace(RING, layout="striped")),
    "cross in a ring": masked(replace(RING, k_length=300)),
    "the only precision": scored(logits_dtype="float32"),
}
REFUSED = {
    "float32": (replace(PROBLEM, dtype="float32"), "float32 (it takes bfloat16, float16)"),
    "soft cap": (scored(softcap=20.0), "logits_soft_cap"),
    "no scale": (scored(scale=0.0), "positive softmax_scale, got 0.0"),
    "negative scale": (scored(scale=-0.5), "positive softmax_scale, got -0.5"),
    "dropout": (scored(dropout_prob=0.1), "does not handle dropout"),
    "mask function": (scored(predicates=("any",)), "mask functions"),
    "logits dtype": (scored(logits_dtype="bfloat16"), "logits_dtype bfloat16"),
    "precision": (scored(precision="HIGHEST"), "precision"),
    "gradient of the LSE": (replace(PROBLEM, features=frozenset({"lse_gradient"})), "gradient of the LSE"),
    "bias": (replace(PROBLEM, features=frozenset({"bias"})), "a bias"),
    "mask": (replace(PROBLEM, features=frozenset({"mask"})), "a boolean mask"),
    "segments": (replace(PROBLEM, features=frozenset({"q_segment_ids", "kv_segment_ids"})), "segment ids"),
    "positions": (replace(PROBLEM, features=frozenset({"q_position_ids", "kv_position_ids"})), "position ids"),
    "slopes": (replace(PROBLEM, features=frozenset({"alibi_slopes"})), "ALiBi"),
    "chunks": (masked(chunk=64), "chunk_size"),
    "window of two sides": (masked(window=(5, 3)), "looks ahead"),
    "window to the left": (masked(window=(5, None)), "window is causal"),
    "window over fewer keys": (masked(replace(PROBLEM, k_length=100), causal=True, window=16), "as many keys as queries"),
    "window in a ring": (masked(RING, causal=True, window=1022), "no window in a ring"),
    "striped": (replace(RING, layout="striped"), 'got "striped"'),
    "causal over other lengths in a ring": (replace(RING, k_length=300), "one length, got 256 and 300"),
    "one query and one key": (replace(PROBLEM, q_length=1, k_length=1), "single query and a single key"),
    "tiles of one": (replace(RING, q_length=2, k_length=2), "single query and a single key"),
    "odd head dim": (replace(PROBLEM, dim=100, value_dim=100), "multiples of 8, got 100 and 100"),
    "too wide": (replace(PROBLEM, dim=264, value_dim=264), "at most 256, got 264"),
}


@pytest.fixture
def hopper(monkeypatch):
    """As if on an H100 with a recent cuDNN."""
    monkeypatch.setattr(calls, "version", lambda: 91900)
    monkeypatch.setattr(launch, "missing", lambda *_: "Triton is not installed")


def reason(problem: Problem) -> str | None:
    asked = problem.features | of_scores(problem.scores) | {problem.dtype}
    return refusal(asked, cudnn.CAPABILITIES) or cudnn.unsupported(problem, FwdParams(), BwdParams())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", TAKEN)
def test_takes(name: str):
    assert reason(TAKEN[name]) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_says_why(name: str):
    problem, words = REFUSED[name]
    assert words in (reason(problem) or "")


@pytest.mark.parametrize("params", [(FwdParams(q_blocksize=128), BwdParams()), (FwdParams(), BwdParams(num_warps=4))])
def test_refuses_tiles(params):
    assert "chooses its tiles itself" in (cudnn.unsupported(PROBLEM, *params) or "")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "dims", "words"),
    [
        (80, (128, 128), None),
        (80, (256, 256), "at most 128"),
        (80, (128, 64), "value dim is its head dim"),
        (100, (192, 128), None),
        (100, (256, 256), "at most 128"),
        (120, (192, 128), "at most 128"),
        (75, (64, 64), "compute capability 8.0, this GPU has 7.5"),
    ],
)
def test_other_gpus(capability, dims, words):
    found = reason(replace(PROBLEM, dim=dims[0], value_dim=dims[1], capability=capability))
    assert found is None if words is None else words in (found or "")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("version", "words"), [(0, "finds no cuDNN"), (91001, "needs cuDNN 9.10.2, this is 9.10.1"), (91002, None)]
)
def test_other_versions_of_cudnn(monkeypatch, version, words):
    monkeypatch.setattr(calls, "version", lambda: version)
    assert reason(PROBLEM) is None if words is None else words in (reason(PROBLEM) or "")


def test_no_gpu():
    with pytest.raises(NotImplementedError, match='platform="cuda": cuDNN needs an NVIDIA GPU, and this program runs on "cpu"'):
        choose(Options(platform="cuda"), replace(PROBLEM, backend="cpu"))


# ------------------------------------------------------------------------------------------------ JAX's private calls


def test_jax_has_the_calls():
    calls.changed.cache_clear()
    assert calls.changed() is None


def gone(*_):
    raise ImportError("No module named 'jax._src.cudnn'")


def renamed(private):
    return types.SimpleNamespace(MaskType=private.MaskType, AttentionLayout=private.AttentionLayout)


def another_argument(private):
    bind = private._dot_product_attention_fwd_p_wrapper.bind
    primitive = types.SimpleNamespace(bind=lambda *arrays, **settings: bind(*arrays, **settings, deterministic=True))
    return types.SimpleNamespace(**vars(private) | {"_dot_product_attention_fwd_p_wrapper": primitive})


def other_results(private):
    bind = private._dot_product_attention_fwd_p_wrapper.bind

    def rows_first(*arrays, **settings):
        out, lse = bind(*arrays, **settings)
        return out, jnp.swapaxes(lse, 1, 2)

    return types.SimpleNamespace(**vars(private) | {"_dot_product_attention_fwd_p_wrapper": types.SimpleNamespace(bind=rows_first)})


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("drift", "words"),
    [
        (gone, "ImportError: No module named"),
        (renamed, "AttributeError"),
        (another_argument, "TypeError"),
        (other_results, r"results \[.*\(2, 16, 4\)"),
    ],
)
def test_jax_has_other_calls(monkeypatch, drift, words):
    """A named request says so; "auto" goes on without."""
    private = calls.cudnn_attention()
    monkeypatch.setattr(calls, "cudnn_attention", lambda: drift(private))
    calls.changed.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match=f"other versions of JAX than {jax.__version__} \\(.*{words}"):
            choose(Options(platform="cuda"), PROBLEM)
        assert choose(Options(), PROBLEM).kernel is not cudnn
    finally:
        monkeypatch.undo()
        calls.changed.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_lowers_for_a_gpu(monkeypatch, causal):
    """The real calls, in a ring of two, as far as a machine without a GPU can go."""
    monkeypatch.setattr(calls, "missing", lambda *_: None)
    monkeypatch.setattr(hardware, "capability", lambda backend: 90)
    rows = P(None, "ring")

    def attend(q, k, v):
        return jax_core.ring_attention(q, k, v, axis_name="ring", causal=causal, layout="zigzag", platform="cuda")

    on_ring = jax.shard_map(attend, mesh=ring_mesh(2), in_specs=(rows,) * 3, out_specs=rows)
    gradients = jax.grad(lambda *arrays: on_ring(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
    query, key = (jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    text = jax.jit(gradients).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmax" in text or "CustomSPMDPartitioning" in text


# ------------------------------------------------------------------------------------------- the ring over the calls


def stand_in_forward(q, k, v, *, scale, causal=False, window=None):
    logits, visible = _logits(q, k, scale, causal, window)
    lse = jax.nn.logsumexp(jnp.where(visible, logits, -jnp.inf), axis=-1)
    weights = jnp.where(visible, jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, v.astype(jnp.float32))
    return out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def stand_in_backward(q, k, v, out, dout, lse, *, scale, causal=False, window=None):
    logits, visible = _logits(q, k, scale, causal, window)
    weights = jnp.where(visible, jnp.exp(logits - lse.reshape(logits.shape[:-1])[..., None]), 0)
    dout, out = (_grouped(x, k) for x in (dout, out))
    delta = jnp.moveaxis((dout * out).sum(-1), 1, 3)
    query, key, value = _grouped(q, k), k.astype(jnp.float32), v.astype(jnp.float32)
    dlogits = scale * weights * (jnp.einsum("bqkgd,bskd->bkgqs", dout, value) - delta[..., None])
    dq = jnp.einsum("bkgqs,bskd->bqkgd", dlogits, key).reshape(q.shape)
    dk, dv = jnp.einsum("bkgqs,bqkgd->bskd", dlogits, query), jnp.einsum("bkgqs,bqkgd->bskd", weights, dout)
    return tuple(gradient.astype(q.dtype) for gradient in (dq, dk, dv))


def _logits(q, k, scale, causal, window):
    """``[batch, kv_heads, group, queries, keys]``, and which of them are visible."""
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    visible = ((distance >= 0) | (not causal)) & (distance < (window or 2**30))
    return scale * jnp.einsum("bqkgd,bskd->bkgqs", _grouped(q, k), k.astype(jnp.float32)), visible


def _grouped(x, k):
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).astype(jnp.float32)


@pytest.fixture
def stand_in(monkeypatch):
    """In any dtype: in float32 nothing is rounded, and the ring's logic is all that can be wrong."""
    monkeypatch.setattr(calls, "forward", stand_in_forward)
    monkeypatch.setattr(calls, "backward", stand_in_backward)
    monkeypatch.setattr(calls, "missing", lambda *_: None)
    monkeypatch.setattr(hardware, "capability", lambda backend: 90)
    # The cases ask for the LSE, with cotangent 0.
    monkeypatch.setattr(cudnn, "CAPABILITIES", cudnn.CAPABILITIES | {"float32", "float64", "lse_gradient"})


def _case(name: str, **settings: Any) -> Case:
    """The LSE is asked for, and has no cotangent."""
    return Case(name, settings={"platform": "cuda"}, block=None, lse_cotangent=False, **settings)


CASES = (
    _case("alone", mode="alone", options=CAUSAL, kv_heads=2),
    _case("alone, all visible", mode="alone", queries=19, keys=31),
    _case("alone over fewer keys", mode="alone", queries=31, keys=10, options=CAUSAL),
    _case("alone with a window", mode="alone", queries=31, options=CAUSAL | {"sliding_window": 7}),
    _case("alone with sinks", mode="alone", options=CAUSAL, arrays=SINKS, kv_heads=1),
    _case("zigzag of one", layout="zigzag", options=CAUSAL),
    _case("striped of one", layout="striped", options=CAUSAL | {"sliding_window": 3}),
    _case("zigzag of two", slow=True, ring=2, layout="zigzag", options=CAUSAL, kv_heads=2, value_dim=16),
    _case("zigzag of four", ring=4, layout="zigzag", queries=14, options=CAUSAL | {"softmax_scale": 0.3}, kv_heads=1),
    _case("zigzag with sinks", slow=True, ring=4, layout="zigzag", queries=14, options=CAUSAL, arrays=SINKS),
    _case("zigzag, all visible", slow=True, ring=4, layout="zigzag", queries=14, keys=18, kv_heads=2),
    _case("contiguous of two", slow=True, ring=2, options=CAUSAL | {"sliding_window": 47}, value_dim=16),
    _case("contiguous of four", ring=4, queries=15, options=CAUSAL, kv_heads=2),
    _case("contiguous, all visible", slow=True, ring=4, queries=15, keys=9),
    _case("striped, all visible", slow=True, ring=2, layout="striped", queries=15, keys=9),
    _case("mesh", slow=True, ring=2, mode="mesh", layout="zigzag", options=CAUSAL),
)


@pytest.mark.usefixtures("stand_in")
@over(CASES)
def test_ring_over_a_stand_in(case: Case):
    assert_ring_is_like_the_oracle(case)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("layout", "options"),
    [("zigzag", CAUSAL), ("contiguous", CAUSAL), ("striped", {})],
    ids=["zigzag", "contiguous", "all visible"],
)
def test_heads_one_group_after_the_other(monkeypatch, layout: str, options):
    """As long shards have it; four groups are wanted here, of six K/V heads, so there are three."""
    monkeypatch.setattr(kernel, "ROWS_OF_A_CALL", 1)
    seen = []
    monkeypatch.setattr(calls, "backward", lambda q, *more, **options: seen.append(q) or stand_in_backward(q, *more, **options))
    case = _case("groups", ring=4, layout=layout, queries=14, options=options, heads=12, kv_heads=6)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, ring_results(case, inputs, cotangents), inputs, cotangents)
    assert {q.shape[2] for q in seen} == {12, 4}


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "groups"),
    [(2**11, 32, 8, 1), (2**13, 32, 8, 2), (2**14, 32, 8, 4), (2**17, 32, 8, 4), (2**17, 32, 6, 3), (2**17, 8, 1, 1)],
)
def test_long_shards_divide_their_heads(length, heads, kv_heads, groups):
    q, k = (jax.ShapeDtypeStruct((1, length, count, 128), jnp.bfloat16) for count in (heads, kv_heads))
    assert kernel._head_groups(q, k) == groups


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_without_check_vma(layout: str):
    case = _case("without check_vma", ring=4, layout=layout, queries=10, options=CAUSAL)
    assert_ring_is_like_the_oracle(case, check_vma=False)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_16_bits_do_not_add_up(layout: str, dtype: str):
    """Each pair's results are rounded to 16 bits. Whatever the ring, that is at most as much again as inputs and results of 16 bits
    cost in any case."""
    case = _case("16 bits", queries=64, layout=layout, options=CAUSAL, kv_heads=2, dtype=dtype, dim=16)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    exact = oracle_results(case, inputs, cotangents)
    errors = {}
    for ring in (1, 2, 8):
        split = replace(case, ring=ring, queries=64 // ring)
        got = ring_results(split, inputs, cotangents)
        for name, wanted in exact.items():
            relative = root_mean_square(finite(got[name]) - finite(wanted)) / root_mean_square(finite(wanted))
            assert relative < 1.5 * float(jnp.finfo(dtype).eps), (name, ring, relative)
            errors[name, ring] = relative
    for name in ("out", "d_query"):
        assert errors[name, 8] < 2 * errors[name, 1], (name, errors)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("layout", "poisoned"), [("zigzag", ("query",)), ("contiguous", ("key", "value"))])
def test_what_is_hidden_does_not_leak(layout: str, poisoned: tuple[str, ...]):
    """Tiles that are computed and dropped: NaN in them reaches nothing. (Half of the sequence is late here, in both layouts.)"""
    case = _case("hidden", ring=4, layout=layout, queries=8, options=CAUSAL)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    clean = ring_results(case, inputs, cotangents)
    for name in poisoned:
        inputs[name][:, 16:] = np.nan
    got = ring_results(case, inputs, cotangents)
    for name in ("out", "d_query"):
        np.testing.assert_array_equal(got[name][:, :16], clean[name][:, :16])
        assert np.isnan(got[name][:, 16:]).all()
    np.testing.assert_array_equal(got["lse"][:, :, :16], clean["lse"][:, :, :16])
