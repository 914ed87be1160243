"""A rank is busy in the backward of a function between two ring calls, and no longer."""

import torch

from torch_bridge.call.busy import busy_in_backward
from torch_bridge.failures import peers


def test_from_the_results_gradients_to_the_operands():
    seen, x = [], torch.ones(3, requires_grad=True)

    def function(x, *, scale):
        y = x * scale
        y.register_hook(lambda _: seen.append(len(peers.state.preparing)))
        return y, scale

    before = len(peers.state.preparing)
    y, _ = busy_in_backward(function)(x, scale=torch.tensor(2.0))
    y.sum().backward()
    assert seen == [before + 1] and len(peers.state.preparing) == before
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_backward_that_does_not_come_to_the_operands_is_over_at_the_next_call():
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    run, before = busy_in_backward(lambda x: (x * weight, x.sum())), len(peers.state.preparing)
    y, _ = run(x)
    for _ in range(2):
        torch.autograd.grad(y.sum(), weight, retain_graph=True)
    assert len(peers.state.preparing) == before + 1
    run(x)
    assert len(peers.state.preparing) == before
