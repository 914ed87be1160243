"""``explain`` and ``Explaining``: of calls from torch, in one process and over a ring of two."""

from pathlib import Path

import pytest
import torch
from launch import torchrun

import jax_core
from ring_attn import Explaining, RingAttention, explain, ring_attention
from torch_bridge.call import explanation, programs


def test_nothing_is_computed():
    before, q = len(programs._PROGRAMS), torch.empty(1, 2**20, 8, 64, dtype=torch.bfloat16)
    found = explain(q, q, q, causal=True, softcap=3.0)
    assert (found.strategy, found.kernel) == ("ring", "xla")
    assert len(programs._PROGRAMS) == before


def test_the_report_in_the_docs():
    q, k = torch.empty(1, 2**17, 8, 64, dtype=torch.bfloat16), torch.empty(1, 2**17, 2, 64, dtype=torch.bfloat16)
    said = str(explain(q, k, k, causal=True)).splitlines()
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    shown = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ") and "model(**batch)" not in line]
    assert len(shown) > 10
    assert shown == [line.rstrip() for line in said if line.rstrip() in shown]  # the page leaves lines out


def test_it_is_the_cores_answer():
    q, k = torch.zeros(2, 12, 4, 8), torch.zeros(2, 12, 2, 8)
    assert explain(q, k, k, causal=True) == jax_core.explain(q.numpy(), k.numpy(), k.numpy(), causal=True)


def test_nothing_is_drawn():
    before, q = torch.get_rng_state(), torch.zeros(1, 4, 2, 8)
    assert explain(q, q, q, dropout_p=0.5) == explain(q, q, q, dropout_p=0.5, dropout_seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_are_those_of_the_call():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"q.* and k"):
        explain(q, q[..., :4], q)
    with pytest.raises(NotImplementedError, match='platform="cute"'):
        explain(q, q, q, platform="cute")


def test_errors_name_the_arguments_of_the_call():
    module, x = RingAttention(32, 4, softcap=2.0, platform="cute", batch_first=True), torch.randn(2, 10, 32)
    with pytest.raises(NotImplementedError) as of_the_call:
        module(x, x, x)
    with pytest.raises(NotImplementedError) as of_the_inquiry, Explaining(run=False):
        module(x, x, x)
    assert str(of_the_inquiry.value) == str(of_the_call.value)


def test_a_call_made_again_is_explained_once(monkeypatch):
    decided = []
    monkeypatch.setattr(explanation, "explain_request", lambda key, request: decided.append(request))
    with Explaining() as calls:
        for length in (4, 4, 6):
            ring_attention(*torch.zeros(3, 1, length, 2, 8))
    assert len(decided) == len(calls.found) == 2


def test_the_calls_of_a_model():
    torch.manual_seed(0)
    module, x = RingAttention(32, 4, causal=True, batch_first=True), torch.randn(2, 10, 32, requires_grad=True)
    plain, _ = module(x, x, x)
    with Explaining() as calls:
        seen = [module(x, x, x)[0] for _ in range(2)]
        ring_attention(*torch.zeros(3, 1, 4, 2, 8), softcap=2.0)
    assert all(torch.equal(out, plain) for out in seen)
    seen[0].sum().backward()
    assert x.grad is not None
    assert len(calls.found) == 2
    assert "query [2, 10, 4, 8] torch.float32" in str(calls) and "'logits_soft_cap': 2.0" in str(calls)


@pytest.mark.slow
def test_over_a_ring():
    assert torchrun("explain_worker.py", 2).count("explain worker: all right") == 2
