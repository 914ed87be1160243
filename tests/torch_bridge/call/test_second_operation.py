"""The way of a call does not know attention: another operation goes it, forward and backward, with no change there."""

import pytest
import torch
from launch import torchrun
from recurrence import recurrence, sequential


def inputs(length=7):
    torch.manual_seed(0)
    return [torch.rand(2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_its_results_and_gradients():
    decay, x = inputs()
    h, last = recurrence(decay, x, "local")
    torch.testing.assert_close(h, sequential(decay, x))
    torch.testing.assert_close(last, h[:, -1])
    assert torch.autograd.gradcheck(lambda *tensors: recurrence(*tensors, "local"), (decay, x))


def test_under_torchs_transforms():
    decay, x = inputs()
    assert_same(torch.vmap(lambda a, b: recurrence(a, b, "local")[0])(*(y.expand(4, *y.shape) for y in (decay, x)))[3], decay, x)
    loss = torch.func.grad(lambda a, b: recurrence(a, b, "local")[0].square().sum(), (0, 1))(decay, x)
    torch.testing.assert_close(loss, torch.autograd.grad(sequential(decay, x).square().sum(), (decay, x)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own, of every autograd.Function
def test_in_a_compiled_graph():
    decay, x = inputs()
    compiled = torch.compile(lambda a, b: recurrence(a, b, "local")[0] * 2, fullgraph=True, backend="aot_eager")
    assert_same(compiled(decay, x) / 2, decay, x)


def assert_same(h, decay, x):
    torch.testing.assert_close(h, sequential(decay, x))


def test_its_own_errors():
    decay, x = inputs()
    with pytest.raises(ValueError, match=r"decay must have the shape of x, got \[2, 7, 3\] and \[2, 6, 3\]"):
        recurrence(decay, x[:, :6], "local")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_over_a_ring(size: int):
    torchrun("recurrence_worker.py", size)
