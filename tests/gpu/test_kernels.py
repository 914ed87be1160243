"""The GPU kernels on a GPU, against the oracle. A kernel that cannot be called there is left out, in its own words."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import packed_rows
import pytest
from attention_cases import CASES, Case
from oracle_assertions import assert_ring_is_like_the_oracle
from pairs import ShardPair, check

import jax_core
from jax_core.kernels import cute, triton
from jax_core.kernels.contract import Problem, Scores
from jax_core.kernels.cute import calls as cute_calls
from jax_core.kernels.triton import launch as triton_launch
from jax_core.masks.layout import LAYOUTS
from jax_core.masks.static import make_mask
from jax_core.request.hardware import capability

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def the_kernel(request, a_gpu):
    kernel = cute_calls if "cute" in request.function.__name__ else triton_launch
    reason = kernel.missing("gpu", capability("gpu"))
    if reason:
        pytest.skip(reason)


def whole(case: Case, **settings) -> Case:
    """The case on one device, by the Triton kernels with their own blocks."""
    settings = {name: value for name, value in case.settings.items() if name not in ("cfg", "platform")} | settings
    keys = None if case.keys is None else case.keys * case.ring
    return replace(case, ring=1, queries=case.queries * case.ring, keys=keys, mode="alone", block=None, settings=settings)


def against_the_oracle(case: Case, more: float = 0.0) -> None:
    assert_ring_is_like_the_oracle(case, more)


FOR_TRITON = [case for case in CASES if case.dtype != "float64"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FOR_TRITON])
def test_triton_against_the_oracle(case: Case):
    against_the_oracle(whole(case, platform="triton"))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FOR_TRITON[::4]])
def test_triton_fused_backward(case: Case):
    against_the_oracle(whole(case, platform="triton", fused_backward=True))


DIMS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dims", DIMS)
def test_triton_with_its_own_blocks(dims, dtype):
    """Lengths of many blocks, with a rest; a pair in the middle of a ring."""
    number = DIMS.index(dims)
    layout, size = LAYOUTS[number % 3], 4
    pair = ShardPair(
        1000, 1200 if layout == "contiguous" else 1000, 4, 2, *dims, dtype, layout=layout, rank=2, source=number % 4, size=size
    )
    window = make_mask(True, 900 if number % 2 else None)
    pair = replace(pair, scores=Scores(window, dims[0] ** -0.5), carry=True, last=number % 2 == 0, fused=number % 3 == 2)
    check(triton, pair, defaults(pair))


def defaults(pair: ShardPair):
    sizes = pair.batch, pair.queries, pair.keys, pair.heads, pair.kv_heads, pair.dim, pair.value_dim or pair.dim
    return triton.default_params(Problem(pair.scores, pair.dtype, *sizes))


@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize("name", packed_rows.CASES)
def test_cute_documents_as_rectangles(name, dims):
    """bfloat16 beside XLA's kernel in float32, of the same numbers; 16 times as long."""
    packed = packed_rows.CASES[name]
    if packed.ring > jax.local_device_count():
        pytest.skip(f"needs {packed.ring} GPUs")
    bounds = np.asarray(packed.bounds)
    ends = np.where((bounds > 0) & (bounds < packed.ring * packed.length), 5, 0)  # most tiles have rows of two documents
    packed = packed._replace(bounds=16 * bounds + ends, length=16 * packed.length, dim=dims)
    names, real = ("out", "lse", "dq", "dk", "dv"), packed.piece_table[1]["q_segment_ids"] >= 0
    found, wanted = packed_rows.computed(packed, "cute", "bfloat16"), packed_rows.computed(packed, "xla", "float32")
    for what, x, y in zip(names, found, wanted, strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        assert (np.isneginf(x) == np.isneginf(y)).all(), what
        x, y = (np.where(np.isneginf(each), 0, each) for each in (x, y))
        if what != "lse":
            assert not x[~real].any(), what
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y), (what, np.linalg.norm(x - y) / np.linalg.norm(y))


# What flash-attn-4 lacks, in the words of the refusals.
LACKS = ("dropout", "a bias", "ALiBi", "value dim equal", "without position ids", "64 bits", "logits_dtype", "a precision")
LACKS += ("positive softmax_scale", "multiples of 8")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_cute_against_the_oracle(case: Case):
    case = whole(replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16"), platform="cute")
    rounded_twice = 0.5 if "softmax_aux" in case.arrays else 0.0  # before sinks join, and after
    try:
        against_the_oracle(case, rounded_twice)
    except NotImplementedError as refusal:
        assert any(word in str(refusal) for word in LACKS), refusal


# 16 modulo 32: where flash-attn-4 itself gives a wrong dQ.
CUTE_DIMS = (
    (16, 16),
    (48, 48),
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (64, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)
CUTE_PAIRS = {
    "own shard": dict(rank=2, source=2),
    "an earlier shard": dict(rank=2, source=1),
    "a later shard": dict(rank=1, source=3),
    "full": dict(rank=1, source=3, scores=Scores(make_mask(), 0.1), keys=640),
    "a window, by lists": dict(rank=2, source=1, scores=Scores(make_mask(True, 300), 0.1)),
}


@pytest.mark.parametrize("pair", CUTE_PAIRS)
@pytest.mark.parametrize("dims", CUTE_DIMS)
def test_cute_pairs_of_a_ring(dims, pair):
    number = CUTE_DIMS.index(dims)
    shared = dims[0] == dims[1] and number % 2 == 0
    multiple = 3840 if "lists" in pair else 1280  # of the blocks of all dims, twice
    settings = dict(queries=multiple, keys=multiple, heads=4, kv_heads=2 if shared else 4, dim=dims[0], value_dim=dims[1])
    settings |= dict(dtype="bfloat16", layout="zigzag" if number % 3 else "contiguous", size=4, batch=1 + number % 2, carry=True)
    settings |= dict(deterministic="lists" not in pair, scores=Scores(make_mask(True), 0.1)) | CUTE_PAIRS[pair]
    check(cute, ShardPair(**settings), cute.default_params(None))


@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 129), (77, 1000), (3, 300)])
@pytest.mark.parametrize(
    "mask", [make_mask(True), make_mask(True, 100), make_mask(False, (50, 80)), make_mask(chunk=96), make_mask()]
)
def test_cute_lengths_that_end_inside_a_tile(lengths, mask):
    pair = ShardPair(*lengths, 4, 2, 64, 64, "float16", batch=2, scores=Scores(mask, 0.125))
    check(cute, pair, cute.default_params(None))


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [dict(causal=True), dict(), dict(causal=True, sliding_window=(200, 0))], ids=str)
def test_the_deterministic_backward_of_cute(options, kv_heads):
    shapes = [(2, 1500, heads, 128) for heads in (8, kv_heads, kv_heads, 8)]
    q, k, v, dout = (jax.random.normal(jax.random.key(i), shape, "bfloat16") for i, shape in enumerate(shapes))

    @jax.jit
    def gradients(q, k, v):
        attend = lambda *x: jax_core.ring_attention(*x, deterministic=True, platform="cute", **options)  # noqa: E731
        return jax.vjp(attend, q, k, v)[1](dout)

    first = gradients(q, k, v)
    for _ in range(10):
        for once, again in zip(first, gradients(q, k, v), strict=True):
            np.testing.assert_array_equal(np.asarray(once, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("layers", [1, 3])
def test_the_deterministic_backward_of_cute_over_stacked_keys(layers):
    """XLA fuses a call with slices of its operands: keys and values of one array, and what ``lax.scan`` keeps of its turns."""
    shapes = (1, 1024, 4, 64), (2, 1, 1024, 2, 64)
    q, kv = (jax.random.normal(jax.random.key(i), shape, "bfloat16") for i, shape in enumerate(shapes))
    attend = partial(jax_core.ring_attention, causal=True, deterministic=True, platform="cute")

    def sliced(q, kv):
        return jax.lax.scan(lambda x, _: (attend(x, kv[0], kv[1]), None), q, length=layers)[0].astype("float32").sum()

    def apart(q, k, v):
        for _ in range(layers):
            q = attend(q, k, v)
        return q.astype("float32").sum()

    dq, dkv = jax.jit(jax.grad(sliced, (0, 1)))(q, kv)
    for found, expected in zip((dq, *dkv), jax.jit(jax.grad(apart, (0, 1, 2)))(q, *kv), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_backward_is_the_same_in_every_run(dtype):
    q, k, v, dout = (jax.random.normal(jax.random.key(i), (2, 1500, h, 64), dtype) for i, h in enumerate((8, 2, 2, 8)))

    @jax.jit
    def gradients(q, k, v):
        attend = lambda *x: jax_core.ring_attention(*x, causal=True, platform="triton")  # noqa: E731
        return jax.vjp(attend, q, k, v)[1](dout)

    first = gradients(q, k, v)
    for _ in range(20):
        for once, again in zip(first, gradients(q, k, v), strict=True):
            np.testing.assert_array_equal(np.asarray(once, np.float32), np.asarray(again, np.float32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_torch_compile_keeps_its_cache_of_triton():
    """jax-triton changes Triton's cache folder while it is imported."""
    import os

    import torch

    before = os.environ.get("TRITON_CACHE_DIR")
    x = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    import ring_attn

    ring_attn.ring_attention(x, x, x, mesh="local", platform="triton")
    assert os.environ.get("TRITON_CACHE_DIR") == before
    doubled = torch.compile(lambda x: (x.float() * 2).sin().sum(-1))
    torch.testing.assert_close(doubled(x), (x.float() * 2).sin().sum(-1), rtol=1e-4, atol=1e-4)
