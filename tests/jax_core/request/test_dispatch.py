"""Which strategy and which kernel do it; and that a new strategy is a class and a line in the registry."""

import warnings
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_gather_strategy import Toy
from attention_cases import CAUSAL, Case, make_cotangents, make_inputs, ring_mesh, ring_results
from oracle_assertions import assert_like_the_oracle

import jax_core
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from jax_core.experimental import ExperimentalWarning, warn_experimental
from jax_core.kernels import tpu, xla
from jax_core.kernels.contract import Problem, Scores
from jax_core.masks.static import Mask
from jax_core.options import Options
from jax_core.request import dispatch
from jax_core.request.dispatch import choose, named_platform
from jax_core.request.preferences import ON_GPUS, preferred_kernels, preferred_strategies
from jax_core.strategies.fused_ring import FusedRing
from jax_core.strategies.ring import RingStrategy

PLAIN = frozenset({"contiguous", "float32"})


def problem(backend: str = "cpu", asked: frozenset[str] = PLAIN, **changed: Any) -> Problem:
    sizes = dict(batch=1, q_length=512, k_length=512, heads=4, kv_heads=2, dim=128, value_dim=128, size=4)
    settings = dict(scores=Scores(Mask(), 1.0), dtype="float32", features=asked, backend=backend)
    return Problem(**(settings | sizes | changed))


@pytest.mark.parametrize(
    ("options", "named"), [({"strategy": "fused"}, 'strategy="fused"'), ({"platform": "pallas"}, 'platform="pallas"')]
)
def test_what_has_not_met_its_hardware_says_so_once(options: dict[str, Any], named: str):
    warn_experimental.cache_clear()
    with pytest.warns(ExperimentalWarning, match=f"{named} is experimental: .* never run on one"):
        choose(Options(**options), problem("tpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(Options(**options), problem("tpu"))
        warn_experimental.cache_clear()
        choose(Options(**{**options, "strategy": "ring", "platform": "xla"}), problem("tpu"))


# ---------------------------------------------------------------------------------------------------------------- a choice


def test_auto_ends_at_the_ring_around_plain_xla():
    chosen = choose(Options(), problem())
    assert (chosen.strategy, chosen.kernel) == (RingStrategy(), xla)
    assert chosen.fwd_params == xla.default_params(problem())[0]


def test_what_is_given_stands_and_the_kernel_completes_it():
    cfg = RingAttentionConfig(FwdParams(q_blocksize=48), BwdParams(kv_blocksize=80))
    forward, backward = xla.default_params(problem())
    chosen = choose(Options(cfg=cfg), problem())
    assert chosen.fwd_params == FwdParams(q_blocksize=48).completed(forward)
    assert chosen.bwd_params == BwdParams(kv_blocksize=80).completed(backward)


def test_the_fused_ring_is_taken_by_name_only():
    chosen = choose(Options(), problem("tpu"))
    assert (chosen.strategy, chosen.kernel) == (RingStrategy(), tpu)
    assert choose(Options(strategy="fused"), problem("tpu")).strategy == FusedRing()


def test_what_is_named_runs_or_says_why_not():
    with pytest.raises(NotImplementedError, match=r'strategy="fused": it does not handle a bias; use strategy="auto"'):
        choose(Options(strategy="fused"), problem("tpu", PLAIN | {"bias"}))
    with pytest.raises(NotImplementedError, match=r'strategy="fused": it has a kernel of its own.*got platform="xla"'):
        choose(Options(strategy="fused", platform="xla"), problem())
    with pytest.raises(NotImplementedError, match=r'"triton": the Triton kernels need an NVIDIA GPU, and this process has none'):
        choose(Options(platform="triton"), problem("gpu"))
    with pytest.raises(ValueError, match=r"strategy must be one of auto, ring, fused.*; got 'spiral'"):
        choose(Options(strategy="spiral"), problem())
    with pytest.raises(ValueError, match='cfg is for backend "gpu", but this program runs on "cpu"'):
        choose(Options(cfg=RingAttentionConfig(backend="gpu")), problem())


@pytest.mark.parametrize(
    ("platform", "of_cfg", "named"),
    [(None, "auto", "auto"), (None, "xla", "xla"), ("xla", "auto", "xla"), ("auto", "xla", "xla"), ("xla", "xla", "xla")],
)
def test_the_platform_of_a_call_and_of_its_cfg(platform: str | None, of_cfg: Any, named: str):
    assert named_platform(platform, RingAttentionConfig(platform=of_cfg)) == named


def test_two_platforms_that_differ():
    with pytest.raises(ValueError, match=r'platform="xla" and cfg.platform="triton" differ; give one of them'):
        named_platform("xla", RingAttentionConfig(platform="triton"))


def test_measured_choices_cover_every_length_and_end_at_xla():
    for gpus in ON_GPUS:
        assert [row.q_length for row in gpus.kernels] == sorted((row.q_length for row in gpus.kernels), reverse=True)
        for row, capability in product(gpus.kernels, gpus.capabilities):
            assert preferred_kernels(problem("gpu", q_length=max(row.q_length, 1), capability=capability)) == row.order
            assert {"cuda", "triton", "xla"} <= set(row.order) and row.order[-1] == "xla" and row.reason
        assert gpus.kernels[-1].q_length == gpus.strategies[-1].q_length == 0
    assert all(sorted(row.order) == ["cuda", "cute", "triton", "xla"] for row in ON_GPUS[0].kernels)
    assert [gpus.measured for gpus in ON_GPUS] == ["H200", None, None]
    assert preferred_kernels(problem("gpu")) == preferred_kernels(problem("gpu", capability=90))  # not known: what was measured
    every = [capability for gpus in ON_GPUS for capability in gpus.capabilities]
    assert len(every) == len(set(every))
    assert preferred_kernels(problem("gpu", q_length=1))[0] == "triton"  # a token of generation: what was measured
    assert [preferred_kernels(problem(backend))[-1] for backend in ("cpu", "tpu")] == ["xla"] * 2


def test_the_order_of_strategies():
    """All-gather on GPUs for short shards of short sequences and for windows, the ring for the rest, and always last."""

    def order(backend="gpu", windowed=(), **sizes):
        return preferred_strategies(problem(backend, **({"size": 4} | sizes)), windowed)

    assert order(q_length=2048, k_length=2048) == ("all_gather", "ring")
    assert order(q_length=8192, k_length=8192) == ("ring",)
    assert order(q_length=65536, k_length=65536, windowed=("all_gather",)) == ("all_gather", "ring")
    assert order(q_length=2048, k_length=2048, size=64) == ("ring",)
    assert order(q_length=2048, k_length=2048, size=1) == ("ring",)
    assert order("cpu", windowed=("all_gather",)) == order("tpu") == ("ring",)


def test_axes_that_are_named_as_a_strategy():
    asked = problem(size=4, heads=8)
    two_axes = replace(asked, sizes=(2, 2))
    for axes in (("ulysses", "ring"), ("ring", "ulysses")):
        assert choose(Options(), two_axes, axes=axes).strategy is dispatch.STRATEGIES["_".join(axes)]
    assert choose(Options(), two_axes, axes=("a", "b")).strategy == RingStrategy()
    assert choose(Options(), replace(two_axes, heads=3, kv_heads=1), axes=("ulysses", "ring")).strategy == RingStrategy()
    assert choose(Options(strategy="ring"), two_axes, axes=("ulysses", "ring")).strategy == RingStrategy()


def test_what_a_strategy_says_of_itself():
    """That its queries are shared, that axes of these names mean it, and that a window lets it send its edges alone."""
    assert {name for name in dispatch.STRATEGIES if name in dispatch.SHARED_QUERIES} == {"decode"}
    axes = {name: strategy.axes for name, strategy in dispatch.STRATEGIES.items() if strategy.axes}
    assert axes == {"ulysses_ring": ("ulysses", "ring"), "ring_ulysses": ("ring", "ulysses")}
    window = problem("gpu", PLAIN | {"causal", "left"}, scores=Scores(Mask(causal=True, left=100), 1.0))
    assert {name for name, strategy in dispatch.STRATEGIES.items() if strategy.sends_halo_only(window)} == {"all_gather"}
    assert not any(strategy.sends_halo_only(problem()) for strategy in dispatch.STRATEGIES.values())


# ---------------------------------------------------------------------------------------------------------- a new strategy


@pytest.fixture
def registered(monkeypatch):
    """The one line that a new strategy needs, under which it has its name."""
    monkeypatch.setattr(dispatch, "STRATEGIES", MappingProxyType({**dispatch.STRATEGIES, "toy": Toy()}))


@pytest.mark.usefixtures("registered")
def test_a_new_strategy_computes_under_its_name():
    """Forward and every gradient, inside shard_map and with a mesh; and it is this one that runs."""
    case = Case("toy", ring=4, queries=10, kv_heads=2, options=CAUSAL, settings={"strategy": "toy"})
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, ring_results(case, inputs, cotangents), inputs, cotangents)
    attend = partial(jax_core.ring_attention, mesh=ring_mesh(2), causal=True, strategy="toy")
    program = jax.jit(attend).lower(*(inputs[name] for name in ("query", "key", "value"))).as_text()
    assert "all_gather" in program
    assert "collective_permute" not in program


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softmax_aux": np.zeros(2, np.float32)}, "sinks"),
        ({"sliding_window": 3}, "a sliding window"),
        ({"layout": "zigzag"}, "zigzag"),
        ({"fused_backward": True}, "fused_backward=True"),
        ({"q_segment_ids": np.zeros(16, np.int32)}, "segment ids"),
    ],
)
def test_what_a_new_strategy_does_not_declare_is_refused(options: dict[str, Any], words: str):
    arrays = [jnp.zeros((1, 16, 2, 4))] * 3
    with pytest.raises(NotImplementedError, match=rf'strategy="toy": it does not handle .*{words}.*; use strategy="auto"'):
        jax_core.ring_attention(*arrays, mesh=ring_mesh(2), strategy="toy", **options)


@pytest.mark.usefixtures("registered")
def test_a_new_strategy_is_known_by_name_and_says_what_it_cannot():
    arrays = [jnp.zeros((1, 16, 2, 4))] * 3
    with pytest.raises(ValueError, match=r"strategy must be one of auto, ring, fused.*, toy; got 'other'"):
        jax_core.ring_attention(*arrays, strategy="other")
    with pytest.raises(NotImplementedError, match="it is for rings of two at least"):
        jax_core.ring_attention(*arrays, strategy="toy")
