"""The fused strategy against the oracle in Pallas' TPU interpreter, which also looks for races, and compiled for TPUs that are not
here."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CAUSAL,
    PACKED,
    SINKS,
    Case,
    booleans,
    make_cotangents,
    make_inputs,
    normal,
    positions,
    positive,
    ring_mesh,
    ring_output,
    ring_results,
    seed,
)
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import assert_like_the_oracle

import jax_core
from jax_core import fused
from jax_core.kernels.pallas.fused_plan import journey
from jax_core.mask import make_mask
from jax_core.torus import is_ring


def race_detector(**settings):
    """Runs kernels in the interpreter that prints ``RACE DETECTED`` when it sees one."""
    # Every DMA under way has a clock: with few of them two would share one, and a race between them would not show.
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, vector_clock_size=64, **settings))


def case(name: str, **settings) -> Case:
    defaults: dict[str, Any] = dict(ring=4, queries=24, batch=1, heads=2, kv_heads=1, block=None, settings={"strategy": "fused"})
    return Case(f"fused {name}", **(defaults | settings))


CASES = (
    case("full, odd length", queries=23, heads=3),
    case("causal contiguous, sinks", kv_heads=2, options=CAUSAL, arrays=SINKS),
    case("causal zigzag, segments", layout="zigzag", batch=2, options=CAUSAL, arrays=PACKED),
    case("causal striped, soft cap", layout="striped", queries=21, spread=5.0, options=CAUSAL | {"logits_soft_cap": 2.5}),
    case("window", queries=20, options=CAUSAL | {"sliding_window": 23}),
    case("window of two sides", layout="zigzag", ring=3, options={"sliding_window": (30, 7)}),
    case("chunks, more keys", layout="striped", ring=2, queries=18, keys=31, value_dim=13, options={"chunk_size": 11}),
    case("several blocks", ring=2, queries=300, heads=1, dtype="bfloat16", options=CAUSAL, block=128),
    case("ring of eight", ring=8, queries=6, heads=1, options=CAUSAL, layout="zigzag", lse_cotangent=False, slow=True),
)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in CASES])
def test_against_the_oracle(case: Case, capsys):
    """Output, LSE and every gradient; and no race."""
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    with race_detector():
        got = ring_results(case, inputs, cotangents)
    said = capsys.readouterr().out
    assert_like_the_oracle(case, got, inputs, cotangents)
    assert "RACE DETECTED" not in said
    assert "non-zero count" not in said  # of a semaphore, when a kernel ends


# ------------------------------------------------------------------------------------------------------------------ races


@pytest.mark.parametrize("without", ["credit", "arrival", "departure"])
def test_a_wait_left_out_is_a_race(without: str, monkeypatch, capsys):
    """The detector finds nothing because all waits are needed and there, not because it is blind."""
    make_plan = fused.make_plan
    monkeypatch.setattr(fused, "make_plan", lambda *arguments: replace(make_plan(*arguments), without=without))
    # Copies made late are read by nobody who does not wait for them, so what is to arrive must be there at once.
    when = {"arrival": "eager"}.get(without, "on_wait")
    small = case(f"without {without}", heads=1)
    with race_detector(dma_execution_mode=when):
        ring_output(small, make_inputs(small))
    assert "RACE DETECTED" in capsys.readouterr().out
