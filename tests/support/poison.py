"""Padding may hold anything: compares a case's results with finite padding and with NaN and infinities there, bit for bit."""

import numpy as np
from attention_cases import Arrays, Case, make_cotangents, make_inputs, ring_results, segments

PADDED = {"q_segment_ids": segments("q", padding=0.3)}
_POISON = np.array([np.nan, np.inf, -np.inf, 3e38])


def HIDING(heads):
    """Makes a mask ``[1, heads, T, S]`` that hides every fourth key from every query."""

    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        mask = rng.random((1, case.heads if heads == "H" else heads, case.whole_queries, case.whole_keys)) < 0.7
        mask[..., ::4] = False
        return mask

    return make


def assert_padding_holds_anything(case: Case, check_vma: bool = True) -> None:
    """Every result is bit-identical, and the gradients of padding are 0."""
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    q_padding, kv_padding = padding(case, inputs)
    assert q_padding.any() or kv_padding.any()
    clean = ring_results(case, inputs, cotangents, check_vma)
    poisoned = {"query": q_padding, "key": kv_padding, "value": kv_padding}
    inputs |= {name: _poisoned(inputs[name], rows) for name, rows in poisoned.items()}
    lse = _poisoned(cotangents["lse"].swapaxes(1, 2), q_padding).swapaxes(1, 2) if case.lse_cotangent else cotangents["lse"]
    got = ring_results(case, inputs, {"out": _poisoned(cotangents["out"], q_padding), "lse": lse}, check_vma)
    for name, wanted in clean.items():
        np.testing.assert_array_equal(got[name], wanted, err_msg=name)
        assert not np.isnan(got[name]).any(), name
    for name, rows in poisoned.items():
        assert not got[f"d_{name}"][rows].any(), name


def padding(case: Case, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """bool ``[batch, length]`` of queries and of keys: negative segment ids, and keys that the mask hides from every query."""
    q_ids = inputs.get("q_segment_ids", np.zeros((case.batch, case.whole_queries), np.int32))
    kv_ids = inputs.get("kv_segment_ids", q_ids if "q_segment_ids" in inputs else np.zeros((case.batch, case.whole_keys), np.int32))
    hidden = kv_ids < 0
    if "mask" in inputs:
        hidden = hidden | ~inputs["mask"].any((1, 2))
    return q_ids < 0, hidden


def _poisoned(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``array [batch, length, ...]`` with a different poison value in each of ``rows``."""
    found = array.copy()
    count = int(rows.sum())
    poison = np.resize(_POISON, count).astype(array.dtype)
    found[rows] = poison.reshape(count, *[1] * (array.ndim - 2))
    return found
