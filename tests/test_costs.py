"""The cost model: what a rank computes against counting, the closed form against the simulation, and what must hold of any cost."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.scaling.costs import (
    DIRECTIONS,
    Call,
    Kernel,
    Link,
    Machine,
    Pass,
    both,
    estimate,
    load,
    ring_stages,
    seen,
    simulate,
)
from jax_core.masks.layout import shard_indices
from jax_core.masks.static import Mask, make_mask, visible

ROOT = Path(__file__).parent.parent
RATE = 600e12
KERNEL = Pass(product=1 / RATE, score=1e-13, edge=64.0, launch=5e-6, joined=16.0, host=1e-4, host_in_ring=3e-4)
PLAIN = Pass(product=1 / RATE, score=0.0, edge=0.0, launch=0.0, joined=0.0, host=0.0, host_in_ring=0.0)
INSIDE, BETWEEN = Link(300e9, 1e-5), Link(50e9, 3e-5)


def machine(
    kernel: Pass = KERNEL, sharing: float = 0.1, host_size: int = 4, inside: Link = INSIDE, between: Link = BETWEEN
) -> Machine:
    return Machine(4.8e12, sharing, 1.1, host_size, inside, between, {"k": Kernel(kernel, kernel)})


MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(),
    "window": make_mask(causal=True, window=5),
    "both sides": make_mask(window=(3, 6)),
    "chunks": make_mask(chunk=7),
    "chunks of two shards": make_mask(chunk=32),
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_visible_scores_are_counted_exactly(mask: Mask, layout: str):
    call = Call(16, 4, mask=mask, layout=layout)
    for shift in range(call.size):
        for rank in range(call.size):
            queries, keys = (shard_indices(layout, r, call.size, 64) for r in (rank, (rank - shift) % call.size))
            want = sum(bool(visible(mask, q, k)) for q in queries for k in keys)
            assert seen(call, shift).scores[rank] == want


def test_cut_rows_are_those_that_see_a_part():
    """Of a whole causal sequence all but the last, of two other shards of a contiguous one none, of a window those at its edges."""
    assert seen(Call(64), 0).cut.tolist() == [63]
    assert seen(Call(64, 4, layout="contiguous"), 1).cut.tolist() == [0] * 4
    assert seen(Call(64, 4), 2).cut.tolist() == [0] * 4
    assert seen(Call(64, mask=make_mask(causal=True, window=8)), 0).cut.tolist() == [63 + 55]


def test_work_is_counted_as_is_customary():
    assert Call(1024, 4, heads=3, dim=8, value_dim=8).flop("forward") == 4 * 3 * 8 * 4096**2 / 2
    assert Call(1024, 4).flop("backward") == 2.5 * Call(1024, 4).flop("forward")
    assert Call(512, mask=Mask()).flop("forward") == 4 * 32 * 128 * 512**2
    assert Call(1024, 2).split_over(8) == Call(256, 8)
    with pytest.raises(ValueError, match="multiple of the number of ranks; got 2048 tokens on 3"):
        Call(1024, 2).split_over(3)
    with pytest.raises(ValueError, match="zigzag needs"):
        Call(1025, 2)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("length", [256, 2048, 16384])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_closed_form_is_the_simulation_of_a_causal_ring(size: int, length: int, direction: str):
    """In one host and over several, bound by compute, by a link and by latency."""
    call = Call(length, size)
    played = simulate(machine(), ring_stages(machine(), "k", call, direction))
    assert estimate(machine(), "k", call, direction).device == pytest.approx(played, rel=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_closed_form_is_a_close_upper_bound(mask: Mask, layout: str, direction: str):
    scale = 512
    mask = replace(
        mask, left=mask.left and mask.left * scale, right=mask.right and mask.right * scale, chunk=mask.chunk and mask.chunk * scale
    )
    call = Call(8192, 8, mask=mask, layout=layout)
    played = simulate(machine(), ring_stages(machine(), "k", call, direction))
    assert played * (1 - 1e-9) <= estimate(machine(), "k", call, direction).device <= 1.07 * played


def test_a_ring_of_two_by_hand():
    """K/V hide behind the diagonal step; in the backward, dK/dV behind the second one, and their way home behind nothing."""
    model, call = machine(PLAIN, sharing=0.0), Call(8192, 2)
    keys = 8192 * 8 * 2 * 128
    there = home = 1e-5 + keys * 2 / 300e9
    for direction, flop, exposed in (("forward", 1.0, 0.0), ("backward", 2.5, home)):
        computed = 1.1 * flop * 4 * 32 * 128 * (8192 * 8193 / 2 + 8192**2 / 2) / RATE
        found = estimate(model, "k", call, direction)
        assert found.device == pytest.approx(computed + exposed)
        assert found.waiting == pytest.approx(exposed, abs=1e-12)
        assert simulate(model, ring_stages(model, "k", call, direction)) == pytest.approx(computed + exposed)
    assert there < computed / 2


def test_every_shard_but_one_passes_the_slow_link():
    """So a ring over hosts, if its transfers are not hidden, takes as long as they take over the slowest hop."""
    slow = Link(1e9, 1e-5)
    call = Call(512, 16)
    per_step = 1e-5 + 512 * 8 * 2 * 128 * 2 / 1e9
    model = machine(PLAIN, sharing=0.0, between=slow)
    last = ring_stages(model, "k", call, "forward")[-1].compute.max()
    assert estimate(model, "k", call, "forward").device == pytest.approx(15 * per_step + last)
    assert estimate(model, "k", Call(512, 4), "forward").device < 15 * per_step / 100


def test_the_threshold_of_hiding_is_the_known_one():
    """2 (kv_heads / heads) R / B tokens a GPU, for a zigzag causal forward."""
    model = machine(PLAIN, sharing=0.0, host_size=1, between=Link(50e9, 0.0))
    model = replace(model, sustained=1.0)
    threshold = 2 * 8 / 32 * RATE / 50e9
    for length, hides in ((int(threshold) - 2, False), (int(threshold) + 2, True)):
        assert (estimate(model, "k", Call(length, 8), "forward").waiting < 1e-12) is hides


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_gpu_sends_nothing(direction: str):
    (stage,) = ring_stages(machine(), "k", Call(4096), direction)
    assert stage.sends == ()
    found = estimate(machine(), "k", Call(4096), direction)
    assert (found.waiting, found.host) == (0.0, KERNEL.host)
    assert found.device == pytest.approx(1.1 * sum_of_work(direction) + KERNEL.launch)


def sum_of_work(direction: str) -> float:
    scores, operations = 4096 * 4097 / 2 + 64 * 4095, 1.0 if direction == "forward" else 2.5
    return scores * 32 * (4 * 128 * operations / RATE + 1e-13)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_what_is_sent_is_what_the_ring_sends(size: int):
    """Forward: K/V, N-1 times. Backward: K/V alone, N-2 times with dK/dV, and dK/dV alone twice, rounded the last time."""
    keys = 1024 * 8 * 2 * 128
    forward, backward = (ring_stages(machine(), "k", Call(1024, size), way) for way in DIRECTIONS)
    assert [stage.sends for stage in forward] == [((2 * keys, 1),)] * (size - 1) + [()]
    sent = [[part.bytes for part in stage.sends] for stage in backward]
    assert sent == [[2 * keys], *[[6 * keys]] * (size - 2), [4 * keys], [2 * keys]]
    assert backward[-1].compute.tolist() == [0.0] * size


def test_a_window_costs_the_same_in_a_larger_ring():
    """It reaches two shards back; the gradients' way home is longer, but one transfer."""
    window = make_mask(causal=True, window=(1500, 0))
    small, large = (Call(1024, size, mask=window, layout="contiguous") for size in (4, 16))
    one_host = machine(host_size=16)
    assert len(ring_stages(one_host, "k", large, "forward")) == 3
    for way in DIRECTIONS:
        assert estimate(one_host, "k", large, way).device == pytest.approx(estimate(one_host, "k", small, way).device)


@pytest.mark.parametrize("length", [512, 8192])
def test_worse_machines_are_never_faster(length: int):
    call = Call(length, 16)
    worse = [
        machine(),
        machine(between=Link(25e9, 3e-5)),
        machine(between=Link(25e9, 9e-5)),
        machine(between=Link(25e9, 9e-5), sharing=0.3),
        machine(replace(KERNEL, launch=5e-5), between=Link(25e9, 9e-5), sharing=0.3),
    ]
    times = [both(model, "k", call).device for model in worse]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_more_tokens_take_longer_and_longer_shards_are_more_efficient():
    times = [both(machine(), "k", Call(length, 16)).device for length in (256, 1024, 4096, 16384)]
    assert all(before < after for before, after in pairwise(times))
    rates = [length**2 / time for length, time in zip((256, 1024, 4096, 16384), times, strict=True)]
    assert all(before < after for before, after in pairwise(rates))


def test_short_calls_are_the_hosts():
    found = both(machine(), "k", Call(128, 2))
    assert found.total == found.host == pytest.approx(2 * KERNEL.host_in_ring)
    assert both(machine(), "k", Call(65536, 2)).total > found.host


def test_shipped_figures_and_what_is_refused():
    found, source = load()
    assert {"cuda", "triton"} <= set(found.kernels)
    assert 0 <= found.sharing < 1 <= found.sustained
    assert {"device", "date", "versions", "results", "fitted", "assumed"} <= set(source)
    with pytest.raises(ValueError, match="machine must be one of h200; got 'abacus'"):
        load("abacus")
    with pytest.raises(ValueError, match="platform must be one of k, which were measured; got 'xla'"):
        estimate(machine(), "xla", Call(64), "forward")


def test_an_estimate_starts_no_backend():
    code = (
        "from benchmarks.scaling.costs import Call, both, load\n"
        "both(load()[0], 'cuda', Call(8192, 8))\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
