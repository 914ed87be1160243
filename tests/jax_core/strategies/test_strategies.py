"""Every strategy that shares a sequence, by the ring's own table of cases: against the float64 oracle, forward and every gradient.

A machine with few cores tries an eighth of the cases with one strategy each, others on another day, and of the cases in which
everything meets a third.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from attention_cases import (
    BIAS,
    CASES,
    CAUSAL,
    DROPOUT,
    EVERYTHING,
    MASK,
    PACKED,
    SEED,
    Case,
    make_cotangents,
    make_inputs,
    ring_results,
)
from effort import ALL, of_the_day
from oracle_assertions import assert_ring_is_like_the_oracle

from jax_core.kernels import cudnn, cute, triton
from jax_core.kernels.contract import Problem, Scores
from jax_core.masks.static import Mask
from jax_core.request.dispatch import STRATEGIES
from jax_core.strategies.all_gather import AllGather

SHARING = ("all_gather", "ulysses", "ulysses_ring", "ring_ulysses", "hierarchical")
TWO_AXES = ("ulysses_ring", "ring_ulysses", "hierarchical")
MEETING = ("everything", "window cut by causal", "bfloat16 with everything")


def test_every_strategy_is_tried_somewhere():
    elsewhere = {"ring", "fused", "decode"}  # files of their own
    assert set(STRATEGIES) == {*SHARING} | elsewhere & set(STRATEGIES)


def of_strategy(case: Case, strategy: str) -> Case:
    """The case with a strategy, on a mesh that it needs, with heads that it can split."""
    axes = {2: (2, 1), 4: (2, 2), 8: (2, 4), 3: (1, 3)}[case.ring] if strategy in TWO_AXES else ()
    heads = case.heads if case.heads % case.ring == 0 or strategy == "all_gather" else case.heads * case.ring
    return replace(case, axes=axes, heads=heads, settings={**case.settings, "strategy": strategy})


def _marks(number: int, case: Case) -> list[pytest.MarkDecorator]:
    """The first few are always tried."""
    return [] if number < 4 else [pytest.mark.slow if case.name in MEETING else pytest.mark.wide]


def table() -> Iterator[object]:
    shared = [case for case in CASES if case.ring > 1]
    for number, case in enumerate(shared):
        for turn, strategy in enumerate(SHARING):
            if ALL or case.name in MEETING or of_the_day(case.name, len(SHARING)) == turn:
                yield pytest.param(case, strategy, id=f"{strategy}: {case.name}", marks=_marks(number, case))


@pytest.mark.parametrize(("case", "strategy"), list(table()))
def test_against_the_oracle(case: Case, strategy: str):
    case = of_strategy(case, strategy)
    assert_ring_is_like_the_oracle(case)


FEW_KEYS = Case("few keys", ring=8, queries=6, batch=1, heads=8, kv_heads=2, layout="zigzag", options=CAUSAL, block=8)
UNEVEN_HEADS = Case("uneven heads", ring=4, queries=8, batch=1, heads=12, kv_heads=6, options=CAUSAL, block=8)


FACTORISATIONS = [
    ("ulysses_ring", (2, 4), "zigzag"),
    ("ulysses_ring", (4, 2), "striped"),
    ("ring_ulysses", (2, 4), "striped"),
    ("ring_ulysses", (4, 2), "zigzag"),
]
if ALL:
    FACTORISATIONS = list(product(TWO_AXES, [(2, 4), (4, 2), (8, 1), (1, 8)], ["contiguous", "zigzag", "striped"]))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "axes", "layout"), FACTORISATIONS)
def test_factorisations(strategy: str, axes: tuple[int, int], layout: str):
    case = replace(FEW_KEYS, axes=axes, layout=layout, arrays=PACKED, settings={"strategy": strategy})
    assert_ring_is_like_the_oracle(case)


@pytest.mark.parametrize("case", [FEW_KEYS, UNEVEN_HEADS], ids=lambda case: case.name)
def test_key_heads_that_do_not_divide(case: Case):
    """Of two K/V heads each of eight ranks gets a copy of one; of six, each of four ranks gets three halves of what they serve."""
    case = replace(case, settings={"strategy": "ulysses"})
    assert_ring_is_like_the_oracle(case)


ONE_ROW = Case("one row", ring=2, queries=1, keys=3, heads=2, kv_heads=2, arrays=BIAS)
MASK_IN_FLOAT64 = Case("mask in float64", ring=2, queries=4, batch=1, heads=2, kv_heads=1, dtype="float64", arrays=MASK)


@pytest.mark.parametrize("case", [ONE_ROW, MASK_IN_FLOAT64], ids=lambda case: case.name)
def test_rows_are_exchanged(case: Case):
    """A bias whose only row is that of a rank's only query is not one for all queries; booleans are packed beside 64 bits."""
    case = replace(case, settings={"strategy": "ulysses"})
    assert_ring_is_like_the_oracle(case)


def test_kernels_that_go_by_lengths_are_not_asked_for_other_keys():
    """A quarter as many keys: gathered they are as many as a rank's queries, but not those at their positions."""
    lengths = dict(batch=1, q_length=512, k_length=128, heads=4, kv_heads=4, dim=128, value_dim=128, size=4)
    asked = frozenset({"causal", "contiguous", "bfloat16"})
    cross = AllGather().kernel_problem(Problem(Scores(Mask(causal=True), 1.0), "bfloat16", features=asked, **lengths))  # type: ignore[arg-type]
    new = cross.features - asked
    assert cross.q_length == cross.k_length
    assert not new <= cute.CAPABILITIES and not new <= cudnn.CAPABILITIES and new <= triton.CAPABILITIES


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARING)
def test_the_same_weights_fall(strategy: str):
    """Dropout's pattern is that of one device."""
    case = Case("falling", ring=4, queries=12, layout="zigzag", options=DROPOUT | CAUSAL, arrays=SEED, lse_cotangent=False)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    alone = replace(case, ring=1, queries=48, mode="alone")
    expected = ring_results(alone, inputs, cotangents)
    got = ring_results(of_strategy(case, strategy), inputs, cotangents)
    np.testing.assert_allclose(got["out"], expected["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (replace(FEW_KEYS, heads=4, settings={"strategy": "ulysses"}), r"a multiple of the 8 ranks; got 4 heads"),
        (replace(FEW_KEYS, settings={"strategy": "ring_ulysses"}), r"it needs two mesh axes.*got 1"),
        (replace(FEW_KEYS, axes=(2, 2, 2), settings={"strategy": "ulysses_ring"}), r"it needs two mesh axes.*got 3"),
        (replace(EVERYTHING, settings={"strategy": "ulysses", "platform": "triton"}), r"platform=.triton."),
    ],
)
def test_refused_in_words(case: Case, words: str):
    with pytest.raises(NotImplementedError, match=words):
        ring_results(case, make_inputs(case), make_cotangents(case))
