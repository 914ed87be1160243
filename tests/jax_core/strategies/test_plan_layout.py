"""Layouts that are plans, through the whole of jax_core, against the float64 oracle: every feature, on pieces from anywhere."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, CAUSAL, DROPOUT, SEED, Case, make_cotangents, make_inputs, ring_results
from oracle_assertions import assert_ring_is_like_the_oracle

from jax_core.masks.plan import Plan
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec

# One of each feature; those that only say how the function is called are left out, and those whose keys have another length.
NAMES = (
    "bidirectional zigzag", "window cut by causal", "window of two sides", "chunks striped", "soft cap", "grouped heads",
    "wide values", "packed with padding", "positions beyond neighbours", "positions and chunks", "bias", "one bias",
    "slopes per sequence", "sinks per head", "mask", "mask function", "mask builder", "dropout over four", "mesh with everything",
    "window and segments", "bias and window", "mask and builder by index", "float64 with everything", "bfloat16 with everything",
)  # fmt: skip
FAST = ("window cut by causal", "mesh with everything", "bfloat16 with everything")


def planned(case: Case, **changes) -> Case:
    """The case on four pieces a rank, dealt at random."""
    ring, piece = max(case.ring, 2), 7
    order = np.random.default_rng(ring).permutation(4 * ring).reshape(ring, 4)
    plan = Plan(piece, tuple(tuple(sorted(held)) for held in order.tolist()))
    return replace(case, ring=ring, layout=plan, queries=4 * piece, keys=None, **changes)


@pytest.mark.wide
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in NAMES])
def test_against_the_oracle(name: str):
    case = planned(next(case for case in CASES if case.name == name))
    assert_ring_is_like_the_oracle(case)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
def test_other_strategies(strategy: str):
    """Each brings plans into the order of the sequence and back."""
    case = planned(next(case for case in CASES if case.name == "mesh with everything"), settings={"strategy": strategy})
    assert_ring_is_like_the_oracle(case)


@pytest.mark.slow
def test_the_dropout_pattern_is_that_of_one_device():
    case = planned(Case("dropout", ring=4, batch=1, options=CAUSAL | DROPOUT, arrays=SEED))
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    alone = replace(case, mode="alone", layout="contiguous", ring=1, queries=case.whole_queries)
    found, wanted = ring_results(case, inputs, cotangents), ring_results(alone, inputs, cotangents)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=2e-5, err_msg=name)


REFUSED = {
    "more keys": ({}, {"keys": 56}, "28 on each rank; got a key shard of 56 on each of 2 ranks"),
    "cuDNN": ({"platform": "cuda"}, {}, r"it does not handle .*a planned layout \(layout=balance"),
    "fused": ({"strategy": "fused"}, {}, r"it does not handle .*a planned layout \(layout=balance"),
    "ulysses in a ring": ({"strategy": "ulysses_ring"}, {"sizes": (2, 1)}, "a plan does not stay one"),
    "another ring": ({}, {"size": 4}, "is for a ring of 2, and this is a ring of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    options, changes, message = REFUSED[name]
    given = {"size": 2, "queries": 28, "keys": 28, "sizes": (2,)} | changes
    query, key = (jax.ShapeDtypeStruct((1, given[side], 2, 16), jnp.bfloat16) for side in ("queries", "keys"))
    layout = planned(Case("refused", ring=2)).layout
    place = Placement("ring", given["size"], sizes=given["sizes"], backend="cpu")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        make_spec(Options(layout=layout, **options), Operands(query, key, key), place)
