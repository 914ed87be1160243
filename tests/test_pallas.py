"""The Pallas kernels in Pallas's interpreter, through the whole of jax_core, against the float64 oracle. What a TPU's compiler
makes of them: tests/test_tpu_program.py."""

from dataclasses import replace

import pytest
from attention_cases import CASES, Case, make_cotangents, make_inputs, ring_results
from pairs import Pair, check
from test_attention import assert_like_the_oracle

from jax_core.block import Scores
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import pallas
from jax_core.kernels.pallas import kernel, launch
from jax_core.mask import make_mask


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda backend: None)
    monkeypatch.setattr(launch, "generation", lambda: "TPU v5e")
    monkeypatch.setattr(launch, "interpret", lambda: True)
    monkeypatch.setattr(kernel, "LANES", 8)  # small blocks, for many of them in a small shard


def in_pallas(case: Case, **settings) -> Case:
    return replace(case, block=16, settings={"platform": "pallas", **settings}, quick_compile=True)


def against_the_oracle(case: Case) -> None:
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    results = ring_results(case, inputs, cotangents, check_vma=False)  # the interpreter has no types of shard_map
    assert_like_the_oracle(case, results, inputs, cotangents)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.dtype != "float64"])
def test_against_the_oracle(name: str):
    against_the_oracle(in_pallas(next(case for case in CASES if case.name == name)))


SMALL = FwdParams(16, 16), BwdParams(16, 32)
PAIRS = {
    "own shard of a zigzag": Pair(40, 40, layout="zigzag", rank=1, source=1, size=2, carry=True),
    "a later shard of a zigzag": Pair(40, 40, layout="zigzag", rank=0, source=1, size=2, carry=True),
    "a shard that is not seen": Pair(40, 33, rank=0, source=1, size=2, carry=True),
    "nothing seen yet": Pair(40, 33, rank=0, source=1, size=2),
    "striped": Pair(37, 50, layout="striped", rank=1, source=2, size=3, carry=True, fused=True),
    "window of two sides, striped": Pair(33, 50, layout="striped", rank=1, size=3, scores=Scores(make_mask(False, (25, 13)), 0.3)),
    "chunks, zigzag": Pair(50, 50, layout="zigzag", rank=1, source=0, size=2, scores=Scores(make_mask(True, None, 30), 0.3)),
    "dims that are no power of two": Pair(20, 20, dim=80, value_dim=24, kv_heads=2),
    "rounded logits": Pair(20, 20, scores=Scores(make_mask(), 0.3, logits_dtype="bfloat16"), dtype="bfloat16"),
    "fused, grouped": Pair(50, 40, heads=4, kv_heads=2, carry=True, fused=True),
    "the last pair in 16 bits": Pair(40, 40, carry=True, last=True, dtype="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str):
    check(pallas, PAIRS[name], SMALL)
