"""The search: right candidates are timed, wrong and failing ones are named."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tuning import dense_backward, dense_forward, kernel, problem

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import cudnn, tpu, triton, xla
from jax_core.kernels.triton import launch
from jax_core.masks.static import Mask
from jax_core.tune import programs, search, timing
from jax_core.tune.inputs import make_inputs
from jax_core.tune.search import candidates

CAUSAL = problem("causal", Mask(causal=True))


@pytest.fixture(autouse=True)
def one_reference(monkeypatch):
    """Compiled once for all tests of one problem: it takes most of their time."""
    make = search.make_reference
    monkeypatch.setattr(search, "make_reference", lambda *arguments: _references.get(arguments[0]) or _made(make, *arguments))


_references: dict = {}


def _made(make, problem, inputs):
    return _references.setdefault(problem, make(problem, inputs))


def wrong_in(blocks: int, what: str):
    """A kernel whose results named ``what`` are wrong at one position with query blocks of this size."""

    def spoilt(function):
        def call(pair, before, third, config):
            results = function(pair, before, third, config)
            if config.params.q_blocksize != blocks or what not in results._fields:
                return results
            array = getattr(results, what)
            return results._replace(**{what: array.at[(0,) * array.ndim].add(3.0)})

        return call

    return kernel(forward=spoilt(dense_forward), backward=spoilt(dense_backward))


def times(monkeypatch, by_blocks: dict[int, float]) -> list[float]:
    """Milliseconds by the query block's size in place of a clock; returns the rests that were asked for."""
    rests = []

    def take_turns(found, rounds, rest):
        rests.append(rest)
        return {params: by_blocks[params.q_blocksize] * (1 + params.kv_blocksize / 1000) for params in found}

    monkeypatch.setattr(timing, "take_turns", take_turns)
    return rests


@pytest.mark.slow
def test_the_fastest_wins_and_its_gain_is_told(monkeypatch):
    times(monkeypatch, {16: 3.0, 32: 1.0, 64: 2.0})
    for way, result in search.search(kernel(), CAUSAL).items():
        assert result.tuned is not None
        assert (result.tuned.params.q_blocksize, result.tuned.params.kv_blocksize) == (32, 16), way
        assert result.tuned.gain == pytest.approx(100 * (1 - 1.016 / 2.064))
        assert (result.tried, result.listed, result.dropped, result.tuned.complete) == (4, 4, (), True)


def test_noise_is_no_gain(monkeypatch):
    times(monkeypatch, {16: 2.04, 32: 2.04, 64: 2.0})  # 64 x 32 is the heuristic
    for result in search.search(kernel(), CAUSAL).values():
        assert result.tuned is not None and result.tuned.params == result.heuristic and result.tuned.gain == 0


@pytest.mark.parametrize(("what", "way"), [("out", "forward"), ("lse", "forward"), ("dq", "backward"), ("dk", "backward")])
def test_a_wrong_candidate_is_named_and_dropped(monkeypatch, what: str, way: str):
    times(monkeypatch, {16: 3.0, 32: 1.0, 64: 2.0})
    results = search.search(wrong_in(32, what), CAUSAL)
    (dropped,) = results[way].dropped
    assert dropped.startswith(f"32 x 16: wrong: {what} by ")
    found, right = results[way].tuned, results["backward" if way == "forward" else "forward"].tuned
    assert found is not None and found.params.q_blocksize == 64
    assert right is not None and right.params.q_blocksize == 32


@pytest.mark.slow
def test_a_gradient_of_the_bias_is_compared_too(monkeypatch):
    times(monkeypatch, {16: 3.0, 32: 1.0, 64: 2.0})
    results = search.search(wrong_in(32, "dbias"), problem("bias"))
    assert "wrong: dbias" in results["backward"].dropped[0]


def test_nan_is_wrong():
    exact = {"out": jnp.ones(3)}
    assert search.wrong({"out": jnp.array([1.0, jnp.nan, 1.0])}, exact, "float32") == "wrong: out by nan, where 1.0e-05 is allowed"
    nothing_seen = {"lse": jnp.array([1.0, -jnp.inf])}
    assert search.wrong(nothing_seen, nothing_seen, "float32") is None
    assert search.wrong({"lse": jnp.array([1.0, 0.0])}, nothing_seen, "float32") is not None


def test_a_failing_candidate_is_named_and_dropped(monkeypatch):
    times(monkeypatch, {16: 3.0, 32: 1.0, 64: 2.0})

    def forward(pair, carry, out_dtype, config):
        if config.params.q_blocksize == 32:
            raise RuntimeError("out of registers\nand a long trace")
        return dense_forward(pair, carry, out_dtype, config)

    results = search.search(kernel(forward=forward), CAUSAL)
    assert results["forward"].dropped == ("32 x 16: RuntimeError: out of registers",)
    assert results["forward"].tuned is not None and results["backward"].dropped == ()


def test_without_the_heuristic_there_is_no_gain(monkeypatch):
    times(monkeypatch, {16: 3.0, 32: 1.0, 64: 2.0})
    unusable = kernel(default_params=lambda _: (FwdParams(64, 32, 7), BwdParams(64, 32, 7)))

    def forward(pair, carry, out_dtype, config):
        assert config.params.num_stages is None, "no stages"
        return dense_forward(pair, carry, out_dtype, config)

    unusable.forward = forward
    result = search.search(unusable, CAUSAL)["forward"]
    assert result.tuned is not None and result.tuned.heuristic_ms is None and result.tuned.gain is None
    assert result.dropped == ("64 x 32, 7 stages: AssertionError: no stages",)


def test_time_that_is_over_ends_the_search():
    over = search.Limits(until=time.monotonic() - 1)
    for result in search.search(kernel(), CAUSAL, over).values():
        assert (result.tuned, result.tried, result.listed) == (None, 1, 4)


def test_what_time_allowed_is_found(monkeypatch):
    times(monkeypatch, {16: 1.0, 32: 0.5, 64: 2.0})
    clock = iter([0.0, 1.0, 1.0])  # asked before the second and third candidate, and before the second of the backward
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = search.search(kernel(), CAUSAL, search.Limits(until=0.5))["forward"]
    assert result.tuned is not None and result.tuned.params == FwdParams(16, 16) and not result.tuned.complete


@pytest.mark.parametrize("asked", ["bias mask alibi_slopes", "q_segment_ids kv_segment_ids q_position_ids kv_position_ids"])
def test_every_array_can_be_made(asked: str):
    wanted = problem(f"causal {asked}", Mask(causal=True, any_position="position" in asked))
    own = {name: getattr(xla, name) for name in xla.__all__}
    own |= {"configs": lambda _: tuple((params,) for params in xla.default_params(wanted))}
    assert all((result.tried, result.dropped) == (1, ()) for result in search.search(SimpleNamespace(**own), wanted).values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype: str):
    found = search.search(kernel(), problem("causal", Mask(causal=True), dtype=dtype))
    assert all(result.dropped == () for result in found.values())


def test_arrays_that_only_the_caller_has_are_refused():
    scores = CAUSAL.scores.__class__(Mask(), 1.0, predicates=(object(),))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="cannot make those of a mask function"):
        make_inputs(problem(scores=scores))


def test_a_kernel_without_candidates_is_refused():
    assert candidates(cudnn, CAUSAL) == ((), ())
    with pytest.raises(NotImplementedError, match="no candidates"):
        search.search(cudnn, CAUSAL)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("asked", ["", "bias", "mask"])
def test_triton_lists_what_it_can_run(monkeypatch, dim: int, dtype: str, asked: str):
    monkeypatch.setattr(launch, "missing", lambda *_: None)
    wanted = problem(asked, dim=dim, value_dim=dim, dtype=dtype, capability=90)
    forward, backward = candidates(triton, wanted)
    assert len(forward) >= 3 and len(backward) >= 3
    assert all(triton.unsupported(wanted, *triton.default_params(wanted)[:1], params) is None for params in backward)
    assert not any(type(params) is not FwdParams for params in forward)


def test_tpu_lists_tiles():
    forward, backward = tpu.configs(problem(q_length=4096, k_length=4096))
    assert FwdParams(512, 512) in forward and BwdParams(512, 512) in backward


# ----------------------------------------------------------------------------------------------------------- several calls


def test_calls_in_a_row_are_made_one_after_another():
    """And the results are those of one call."""
    made = []

    inputs = make_inputs(CAUSAL)

    def once(inputs, residuals):
        jax.debug.callback(lambda: made.append(1))
        return dense_forward(inputs.pair(CAUSAL.scores), None, "float32", None)._asdict()

    several = jax.jit(lambda inputs: programs._in_a_row(once, 5, inputs, None))(inputs)
    jax.effects_barrier()
    assert len(made) == 5
    np.testing.assert_allclose(several["out"], once(inputs, None)["out"], rtol=1e-6, atol=1e-6)


def test_short_calls_are_repeated_on_a_gpu():
    gpu = dict(backend="gpu", heads=32, kv_heads=8, dim=128, value_dim=128)
    calls = [programs.calls_per_sample(problem(q_length=n, k_length=n, **gpu)) for n in (128, 8192, 65536)]
    assert calls[0] == programs._MOST_CALLS > calls[1] > calls[2] == 1
    window = problem("causal left", Mask(causal=True, left=127), q_length=8192, k_length=8192, **gpu)
    assert programs.calls_per_sample(window) == programs._MOST_CALLS
    assert programs.calls_per_sample(CAUSAL) == 1


def test_programs_take_turns(monkeypatch):
    order: list[str] = []
    clock = iter([0.0, 0.001, 0.0, 0.005, 0.0, 0.007, 0.0, 0.002, 0.0, 0.003, 0.0, 0.006])
    rests = lambda seconds: order.append(f"rest {seconds}")  # noqa: E731
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=rests))
    found = timing.take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, 0.1)  # type: ignore[func-returns-value, dict-item]
    assert order[1::2] == ["a", "b", "b", "a", "a", "b"] and set(order[::2]) == {"rest 0.1"}
    assert found == {"a": pytest.approx(2.0), "b": pytest.approx(6.0)}
