"""Explicit > the user's cache > shipped > a search, if asked for > the kernel's own choice."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tuning import BACKWARD, FORWARD, dense_forward, found, kernel, problem

import jax_core
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from jax_core.kernels import cudnn, xla
from jax_core.kernels.contract import Pair
from jax_core.masks.static import Mask
from jax_core.options import Options
from jax_core.request.dispatch import choose
from jax_core.tune import lookup, search, store
from jax_core.tune.devices import device_name, file_name
from jax_core.tune.keys import key_of
from jax_core.tune.search import Result
from jax_core.tune.table import PASSES, to_json

NOTHING = FwdParams(), BwdParams()
OWN = FwdParams(64, 32), BwdParams(64, 32)  # the small kernel's
PROBLEM = problem("causal", Mask(causal=True))
KEY, DEVICE = key_of("small", PROBLEM), device_name("cpu")
MEASURED = {KEY: {"forward": found(FORWARD), "backward": found(BACKWARD)}}


@pytest.fixture(autouse=True)
def no_memory(monkeypatch, tmp_path):
    """Every test is a process that has looked nothing up, with a cache and shipped data of its own."""
    monkeypatch.setenv("RING_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    for remembered in (lookup.shipped, lookup._read_once, lookup._searched_here, lookup.warn_once):
        remembered.cache_clear()
    yield
    for remembered in (lookup.shipped, lookup._read_once, lookup._searched_here, lookup.warn_once):
        remembered.cache_clear()


def in_cache(table=MEASURED) -> None:
    path = lookup.user_file(DEVICE)
    assert path is not None and store.merge(path, DEVICE, table)


def in_package(table) -> None:
    lookup.SHIPPED.mkdir()
    (lookup.SHIPPED / file_name(DEVICE)).write_text(to_json(table, DEVICE))


def completed(given=NOTHING, own=None, **settings):
    return lookup.completed("small", own or kernel(), PROBLEM, given, **settings)


def test_without_measurements_the_kernel_chooses():
    assert completed() == OWN


def test_shipped_data_come_before_the_kernel_and_the_cache_before_both():
    in_package({KEY: {"forward": found(FwdParams(16, 16)), "backward": found(BwdParams(16, 16))}})
    assert completed() == (FwdParams(16, 16), BwdParams(16, 16))
    in_cache({KEY: {"forward": found(FORWARD)}})
    lookup._read_once.cache_clear()
    assert completed() == (FORWARD, BwdParams(16, 16))
    assert {way: origin.place for way, origin in lookup.origins(KEY, DEVICE).items()} == {"forward": "cache", "backward": "shipped"}


def test_shipped_data_of_another_device_are_not_used():
    in_package(MEASURED)
    path = lookup.SHIPPED / file_name(DEVICE)
    path.write_text(to_json(MEASURED, DEVICE.replace(" ", "-")))
    with pytest.warns(RuntimeWarning, match="are not used: it is of"):
        assert completed() == OWN


def test_what_is_given_stands():
    in_cache()
    given = FwdParams(128, 128), BwdParams(q_blocksize=128)
    assert completed(given) == (FwdParams(128, 128), BwdParams(128, 32))  # completed by the kernel, not by another tile's numbers
    assert completed((FwdParams(128, 128), BwdParams())) == (FwdParams(128, 128), BACKWARD)


def test_a_cache_is_read_once_a_process(monkeypatch):
    in_cache()
    assert completed() == (FORWARD, BACKWARD)
    monkeypatch.setattr(store, "read", None)
    assert completed() == (FORWARD, BACKWARD)


def test_caches_that_are_off_hold_nothing(monkeypatch):
    in_cache()
    monkeypatch.setenv("RING_ATTN_CACHE", "off")
    assert completed() == OWN


def test_a_broken_cache_changes_nothing(monkeypatch):
    in_cache()
    path = lookup.user_file(DEVICE)
    assert path is not None
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert completed() == OWN
    assert completed() == OWN


def test_nothing_is_looked_up_where_it_cannot_apply(monkeypatch):
    monkeypatch.setattr(lookup, "_decide", None)  # raises if it is called
    assert completed(own=_without_configs()) == OWN
    elsewhere = problem(backend="tpu")
    assert lookup.completed("small", kernel(), elsewhere, NOTHING) == OWN
    assert lookup.completed("cuda", cudnn, PROBLEM, NOTHING) == cudnn.default_params(PROBLEM)


def _without_configs():
    own = kernel()
    del own.configs
    return own


def test_parameters_that_cannot_run_are_refused_with_one_warning():
    in_cache()

    def unsupported(problem, forward, backward):
        return "blocks are at most 24" if forward.q_blocksize == FORWARD.q_blocksize else None

    with pytest.warns(RuntimeWarning, match="cannot run here .blocks are at most 24."):
        assert completed(own=kernel(unsupported=unsupported)) == (OWN[0], BACKWARD)
    assert completed(own=kernel(unsupported=unsupported)) == (OWN[0], BACKWARD)


def test_what_another_process_decided_runs_or_is_left(monkeypatch):
    """A key stands for many problems; the process that decided may have had another one."""
    monkeypatch.setattr(lookup, "agreed", lambda what, decide: json.dumps({"forward": vars(FORWARD), "backward": vars(BACKWARD)}))

    def unsupported(problem, forward, backward):
        return "blocks of 64 at least" if forward.q_blocksize < 64 else None

    with pytest.warns(RuntimeWarning, match="blocks of 64 at least"):
        assert completed(own=kernel(unsupported=unsupported)) == (OWN[0], BACKWARD)


# ---------------------------------------------------------------------------------------------------------- at the first call


def searching(monkeypatch, calls: list[str]) -> None:
    def found_at_once(kernel, problem):
        calls.append(problem.dtype)
        params = dict(zip(PASSES, (FORWARD, BACKWARD), strict=True))
        return {way: Result(found(params[way]), OWN[0], 3, 3, ()) for way in PASSES}

    monkeypatch.setattr(search, "search", found_at_once)


def test_a_search_is_made_only_where_it_was_asked_for(monkeypatch):
    calls: list[str] = []
    searching(monkeypatch, calls)
    assert completed() == OWN and calls == []
    assert completed(autotune=True) == (FORWARD, BACKWARD) and calls == ["float32"]
    assert completed(autotune=True) == completed() == (FORWARD, BACKWARD) and len(calls) == 1  # from the cache now
    kept = json.loads((lookup.user_file(DEVICE) or lookup.SHIPPED).read_text())
    assert list(kept["configurations"]) == [KEY]


def test_a_search_without_a_cache_is_made_once_a_process(monkeypatch):
    calls: list[str] = []
    searching(monkeypatch, calls)
    monkeypatch.setenv("RING_ATTN_CACHE", "off")
    for _ in range(2):
        assert completed(autotune=True) == (FORWARD, BACKWARD)
    assert len(calls) == 1


def test_what_is_known_is_not_searched(monkeypatch):
    monkeypatch.setattr(search, "search", None)
    in_cache()
    assert completed(autotune=True) == (FORWARD, BACKWARD)


def test_a_search_that_fails_is_a_warning(monkeypatch):
    def fails(kernel, problem):
        raise MemoryError("no room for its arrays")

    monkeypatch.setattr(search, "search", fails)
    with pytest.warns(RuntimeWarning, match="search .* failed .MemoryError: no room"):
        assert completed(autotune=True) == OWN


@pytest.mark.slow
def test_a_search_in_the_middle_of_a_trace(monkeypatch):
    """It runs on arrays of its own, beside the trace that asked for it; the results are right and kept."""
    monkeypatch.setattr(xla, "configs", lambda problem: ((FwdParams(16, 16),), (BwdParams(16, 16),)))
    cfg = RingAttentionConfig(autotune=True)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 8))
    mesh = jax.make_mesh((2,), ("ring",))

    @jax.jit
    def attend(q, k, v):
        attention = partial(jax_core.ring_attention, causal=True, axis_name="ring", mesh=mesh, cfg=cfg)
        return jax.grad(lambda q: attention(q, k, v).sum())(q)

    got = attend(q, k, v)
    want = jax.grad(lambda q: jax_core.ring_attention(q, k, v, causal=True).sum())(q)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    (key,) = lookup.user_table(DEVICE)
    assert key == "xla float32 dim 8 group 1 causal up to 4096"
    assert [entry.complete for entry in lookup.user_table(DEVICE)[key].values()] == [True, True]


# ------------------------------------------------------------------------------------------------------------- in a request


def test_a_request_takes_what_was_measured():
    wanted = problem("causal", Mask(causal=True))
    in_cache({key_of("xla", wanted): {"forward": found(FwdParams(48, 16))}})
    chosen = choose(Options(), wanted)
    assert (chosen.fwd_params, chosen.bwd_params) == (FwdParams(48, 16), xla.default_params(wanted)[1])
    explicit = choose(Options(cfg=RingAttentionConfig(FwdParams(80, 16))), wanted)
    assert explicit.fwd_params == FwdParams(80, 16)


def test_autotune_is_true_or_false():
    with pytest.raises(ValueError, match="autotune must be True or False, got 'always'"):
        RingAttentionConfig(autotune="always")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_small_kernel_is_attention():
    """So that these tests search with something that is right."""
    q, k, v = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 1, 8)), jnp.arange(4.0).reshape(1, 4, 1, 1)
    out = dense_forward(Pair(q, k, v, (), (), PROBLEM.scores), None, "float32", None).out
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.5, 1, 1.5], rtol=1e-6)
