"""Activation checkpoints hand out once what was saved: a call whose program is there from an earlier one must not look twice."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ring_attn import ring_attention


def attention(*tensors: torch.Tensor) -> torch.Tensor:
    return ring_attention(*tensors, mesh="local", causal=True).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_under_a_checkpoint_can_be_repeated(reentrant: bool):
    tensors = [torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True) for seed in range(3)]
    expected = torch.autograd.grad(attention(*tensors), tensors)
    for times in (1, 2):
        checkpoint(attention, *tensors, use_reentrant=reentrant).backward()
        torch.testing.assert_close([x.grad for x in tensors], [times * gradient for gradient in expected])
