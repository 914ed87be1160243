"""The GPU kernels on a GPU: `make test-gpu`, on a machine that has one. What it printed: benchmarks/results/."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from attention_cases import CASES, Case, make_cotangents, make_inputs, ring_results
from oracle_assertions import assert_like_the_oracle
from pairs import ShardPair, check

import jax_core
from jax_core.kernels import triton
from jax_core.kernels.contract import Problem, Scores
from jax_core.masks.layout import LAYOUTS
from jax_core.masks.static import make_mask

pytestmark = pytest.mark.gpu


def whole(case: Case, **settings) -> Case:
    """The case on one device, by the Triton kernels with their own blocks."""
    settings = {name: value for name, value in case.settings.items() if name not in ("cfg", "platform")} | settings
    keys = None if case.keys is None else case.keys * case.ring
    return replace(case, ring=1, queries=case.queries * case.ring, keys=keys, mode="alone", block=None, settings=settings)


def against_the_oracle(case: Case) -> None:
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, ring_results(case, inputs, cotangents), inputs, cotangents)


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
