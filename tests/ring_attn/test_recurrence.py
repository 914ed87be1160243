"""Layers with a state by torch's face: alone beside the oracle, and on rings of processes beside one process."""

import numpy as np
import pytest
import torch
from launch import torchrun
from state_cases import CASES, ONE_OF_EACH, expected, ids_of
from state_torch import gradients_of, operator_of, stepwise, tensors

import ring_attn


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


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strategy": "ulysses"}, NotImplementedError, 'goes by strategy="prefix"'),
        ({"v": torch.zeros(1, 12, 3, 4)}, ValueError, "g must be .*with heads 3 as the others"),
        ({"operator": lambda *_, **__: (1, 2)}, ValueError, "operator must return its output .* got int and int"),
        (
            {"operator": lambda q, k, v, g, beta, initial_state, output_final_state: (v, initial_state.mT[..., :1])},
            ValueError,
            r"final state \[1, 2, 4, 4\], .* got \[1, 12, 2, 4\] and \[1, 2, 4, 1\]",
        ),
        (
            {"operator": lambda *_, **swallowed: None, "segment_ids": torch.zeros(1, 12, dtype=torch.int32)},
            NotImplementedError,
            "documents and padding need an operator that has cu_seqlens",
        ),
    ],
)
def test_operators_that_cannot_be(changes, error, words):
    beta = torch.rand(1, 12, 2)
    arguments = dict(zip("qkv", qkv(), strict=True)) | {"g": -beta, "beta": beta, "mesh": "local", "operator": stepwise} | changes
    with pytest.raises(error, match=words):
        ring_attn.gated_delta_rule(**arguments)


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
