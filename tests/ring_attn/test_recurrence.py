"""Layers with a state by torch's face: alone beside the oracle, and on rings of processes beside one process."""

from functools import partial

import numpy as np
import pytest
import torch
from launch import torchrun
from state_cases import CASES, ONE_OF_EACH, expected, ids_of
from state_torch import gradients_of, operator_of, stepwise, stepwise_ssd, tensors

import ring_attn
from ring_attn.recurrence import documents as of_documents
from ring_attn.recurrence.state_space import BySums
from ring_attn.recurrence.sums import over_tokens, weighted_over_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_alone(name):
    case, ids = CASES[name], ids_of("padding")
    (y, last), (gradients, dstate) = expected(case, ids)
    results, got = gradients_of(case, *tensors(case), torch.from_numpy(ids), mesh="local")
    for one, exact in zip(
        (*results, *got.values()), (y, last, *(gradients[name] for name in got if name != "state"), dstate), strict=True
    ):
        np.testing.assert_allclose(one, exact, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("documents", ["none", "padding"])
@pytest.mark.parametrize("name", ["delta-norm", "delta-no-decay", "kda", "ssd", "ssd-skip-dims"])
def test_by_an_operator_of_torchs(name, documents):
    case, ids = CASES[name], ids_of(documents)
    (y, last), (gradients, dstate) = expected(case, ids)
    ids = None if ids is None else torch.from_numpy(ids)
    results, got = gradients_of(case, *tensors(case), ids, mesh="local", operator=operator_of(case))
    for one, exact in zip(
        (*results, *got.values()), (y, last, *(gradients[name] for name in got if name != "state"), dstate), strict=True
    ):
        np.testing.assert_allclose(one, exact, rtol=1e-12, atol=1e-11)


def given(dtype=torch.float32):
    torch.manual_seed(1)
    beta = torch.rand(1, 12, 2, dtype=dtype)
    return dict(zip("qkv", qkv(dtype), strict=True)) | {"g": -beta, "beta": beta, "mesh": "local"}


def test_an_operator_with_a_plan_of_one_rank():
    plan, arguments = ring_attn.balance(12, 1, causal=True, piece=4), given(torch.float64)
    got = ring_attn.gated_delta_rule(**arguments, layout=plan, operator=stepwise, output_final_state=True)
    torch.testing.assert_close(got, ring_attn.gated_delta_rule(**arguments, layout=plan, output_final_state=True))
    longer = ring_attn.balance(24, 1, causal=True, piece=4)
    with pytest.raises(ValueError, match="is for queries and keys of 24 positions"):
        ring_attn.gated_delta_rule(**arguments, layout=longer, operator=stepwise)


def test_documents_of_ids_that_nobody_changes_are_found_once(monkeypatch):
    found, arguments, ids = [], given(torch.float64), torch.arange(12)[None] // 5
    original = of_documents._documents
    monkeypatch.setattr(of_documents, "_documents", lambda ids: found.append(1) or original(ids))
    for count, fixed in ((1, False), (2, False), (3, True), (3, True)):
        if fixed and count > len(found):
            of_documents.fix(ids)
        got = ring_attn.gated_delta_rule(**arguments, segment_ids=ids, operator=stepwise)
        torch.testing.assert_close(got, ring_attn.gated_delta_rule(**arguments, segment_ids=ids))
        assert len(found) == count


def test_what_is_read_of_the_state_is_not_rounded_by_autocast():
    x, dt, a, b = torch.randn(1, 12, 2, 4), torch.rand(1, 12, 2), -torch.rand(2), torch.randn(1, 12, 1, 3)
    state = torch.randn(1, 2, 4, 3)
    exact = ring_attn.ssd(x, dt, a, b, b, mesh="local", initial_state=state)
    outside = torch.autocast("cpu", enabled=False)(operator_of(CASES["ssd"]))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ring_attn.ssd(x, dt, a, b, b, mesh="local", initial_state=state, operator=outside), exact)


def test_the_map_of_a_state_space_model_that_forgets():
    """In float32: what a token leaves of a state, and what comes after it, are both in the sums of the whole piece."""
    x, dt, b = torch.randn(1, 12, 2, 4), torch.rand(1, 12, 2), torch.randn(1, 12, 1, 3)
    dt[:, 5] = 1e9
    x[:, 5] *= 1e-9
    operands = x, dt, -torch.rand(2), b, b, None
    m, e, _ = BySums(stepwise_ssd, 4, None).maps(operands)
    _, exact = stepwise_ssd(*(y.double() for y in operands[:5]), 4, return_final_states=True)
    torch.testing.assert_close(e.mT, exact.float(), rtol=1e-5, atol=1e-4)
    assert not m.any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own, of every autograd.Function
def test_an_operator_in_a_compiled_graph():
    def run(arguments):
        return ring_attn.gated_delta_rule(**arguments, operator=stepwise) * 2

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(given()), run(given()))


def test_chunks_of_eight_with_documents():
    """For which LLVM aborted the process, in float64."""
    found = []
    for chunk in (8, 64):
        arguments = {name: x if name == "mesh" else x.detach().requires_grad_() for name, x in given(torch.float64).items()}
        y = ring_attn.gated_delta_rule(**arguments, segment_ids=torch.arange(12)[None] // 5, chunk_size=chunk)
        found.append((y, *torch.autograd.grad(y.square().sum(), [arguments[name] for name in ("q", "k", "v", "g", "beta")])))
    torch.testing.assert_close(*found)


def test_other_layers_take_no_operator():
    with pytest.raises(TypeError, match="unexpected keyword argument 'operator'"):
        ring_attn.linear_attention(*qkv(), mesh="local", operator=stepwise)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"chunk_size": 32}, ValueError, "chunk_size is not given to an operator of torch's, which has its own; .* got 32"),
        ({"strategy": "ulysses"}, NotImplementedError, 'goes by strategy="prefix"'),
        ({"v": torch.zeros(1, 12, 3, 4)}, ValueError, "g must be .*with heads 3 as the others"),
        ({"operator": lambda *_, **__: (1, 2)}, ValueError, "operator must return its output .* got int and int"),
        (
            {"operator": lambda q, k, v, g, beta, initial_state, output_final_state: (v, v)},
            ValueError,
            r"final state \[1, 2, 4, 4\], .* got \[1, 12, 2, 4\] and \[1, 12, 2, 4\]",
        ),
        (
            {"operator": lambda *_, **swallowed: None, "segment_ids": torch.zeros(1, 12, dtype=torch.int32)},
            NotImplementedError,
            "documents and padding need an operator that has cu_seqlens",
        ),
    ],
)
def test_operators_that_cannot_be(changes, error, words):
    with pytest.raises(error, match=words):
        ring_attn.gated_delta_rule(**given() | {"operator": stepwise} | changes)


@pytest.mark.parametrize(
    ("operator", "error", "words"),
    [
        (lambda x, return_final_states: None, NotImplementedError, "needs an operator that has initial_states"),
        (partial(lambda initial_states, dt_bias: None, dt_bias=1), ValueError, "operator has dt_bias of its own"),
        (partial(lambda initial_states, dt_softplus: None, dt_softplus=True), ValueError, "operator has dt_softplus of its own"),
    ],
)
def test_operators_that_compute_another_state_space_model(operator, error, words):
    x, dt, b = torch.randn(1, 12, 2, 4), torch.rand(1, 12, 2), torch.randn(1, 12, 1, 3)
    with pytest.raises(error, match=words):
        ring_attn.ssd(x, dt, -torch.ones(2), b, b, mesh="local", operator=operator)


def test_what_an_operator_is_told_to_leave_is_left():
    def operator(*given, dt_softplus, initial_states, **others):
        assert not dt_softplus
        return stepwise_ssd(*given, initial_states=initial_states, **others)

    x, dt, b = torch.randn(1, 12, 2, 4), torch.rand(1, 12, 2), torch.randn(1, 12, 1, 3)
    y = ring_attn.ssd(x, dt, -torch.ones(2), b, b, mesh="local", operator=partial(operator, dt_softplus=False))
    torch.testing.assert_close(y, ring_attn.ssd(x, dt, -torch.ones(2), b, b, mesh="local"))


def test_sums_over_tokens():
    a, b = torch.randn(2, 7, 3, 4, dtype=torch.float64), torch.randn(2, 7, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(over_tokens(a, b), torch.einsum("pthm,pthn->phmn", a, b))
    half = over_tokens(a.bfloat16(), b.bfloat16())
    assert half.dtype == torch.float32
    exact = over_tokens(a.bfloat16().double(), b.bfloat16().double())
    torch.testing.assert_close(half.double(), exact, rtol=1e-5, atol=1e-5)
    of_groups, weights = torch.randn(2, 7, 1, 4, dtype=torch.float64), torch.rand(2, 3, 7, dtype=torch.float64)
    wanted = torch.einsum("ptm,pthn,pht->phmn", of_groups[:, :, 0], b, weights)
    torch.testing.assert_close(weighted_over_tokens(of_groups, b, weights), wanted)


@pytest.mark.slow
def test_on_two_ranks():
    torchrun("states_worker.py", 2)


@pytest.mark.slow
@pytest.mark.costly
def test_on_four_ranks():
    torchrun("states_worker.py", 4)


def qkv(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 12, 2, 4, dtype=dtype) for _ in range(3)]


def test_dtypes():
    """The output is like v, the state float32, whatever the others are."""
    q, k, v = qkv(torch.bfloat16)
    y, last = ring_attn.linear_attention(q, k, v, torch.tensor([-0.1, -0.2]), mesh="local", output_final_state=True)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    exact = ring_attn.linear_attention(q.double(), k.double(), v.double(), torch.tensor([-0.1, -0.2]).double(), mesh="local")
    assert (y - exact).abs().max() <= exact.abs().max() / 200


def test_a_state_goes_on():
    """Two halves, one after the other, are the whole."""
    q, k, v = qkv(torch.float64)
    whole, last = ring_attn.linear_attention(q, k, v, mesh="local", output_final_state=True)
    state, parts = None, []
    for part in (slice(0, 5), slice(5, 12)):
        half = [x[:, part] for x in (q, k, v)]
        y, state = ring_attn.linear_attention(*half, mesh="local", initial_state=state, output_final_state=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("documents", [{"cu_seqlens": torch.tensor([0, 5])}, {"segment_ids": torch.tensor([[0] * 5 + [-1] * 3])}])
def test_the_state_of_a_convolution_is_that_before_padding(documents):
    x, weight = torch.randn(1, 8, 2), torch.randn(2, 4)
    _, last = ring_attn.causal_conv1d(x, weight, mesh="local", output_final_state=True, **documents)
    assert torch.equal(last, x[:, 2:5])


def test_without_tokens():
    q, k, v = (x[:, :0] for x in qkv())
    state = torch.randn(1, 2, 4, 4, requires_grad=True)
    y, last = ring_attn.linear_attention(q, k, v, mesh="local", initial_state=state, output_final_state=True)
    assert y.shape == v.shape
    torch.testing.assert_close(last, state)
    last.sum().backward()
    torch.testing.assert_close(state.grad, torch.ones_like(state))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own, of every autograd.Function
def test_in_a_compiled_graph():
    def run(q, k, v):
        return ring_attn.linear_attention(q, k, v, mesh="local") * 2

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(*qkv()), run(*qkv()))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [1]}, ValueError, "q must be a torch.Tensor, got list"),
        ({"k": torch.zeros(1, 12, 3, 4)}, ValueError, "k must be .*key heads 2 as the others"),
        ({"segment_ids": torch.zeros(1, 12)}, ValueError, "segment_ids must"),
        ({"cu_seqlens": torch.tensor([0, 13])}, ValueError, "cu_seqlens must ascend from 0 to at most the 12 tokens"),
        ({"ring": ring_attn.Ring("local"), "mesh": "local"}, ValueError, "either ring"),
        ({"seq_idx": None}, TypeError, "which is called segment_ids here"),
    ],
)
def test_refusals(changes, error, words):
    arguments = dict(zip("qkv", qkv(), strict=True)) | {"mesh": "local"} | changes
    with pytest.raises(error, match=words):
        ring_attn.linear_attention(**arguments)


def test_operands_of_another_rank_are_refused_in_words():
    with pytest.raises(ValueError, match=r"x must be \[batch, seq, channels\], got \[5, 4\]"):
        ring_attn.causal_conv1d(torch.randn(5, 4), torch.randn(4, 3), mesh="local")
