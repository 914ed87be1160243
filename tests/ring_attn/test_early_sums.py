"""Sums of gradients that begin while the backward runs: the same bits as those of the call, and nothing left behind."""

import pytest
import torch
from launch import torchrun
from torch import nn

from ring_attn import sync_gradients


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_over_a_ring(size):
    assert torchrun("early_sums_worker.py", size).count("all right") == size


def test_a_ring_of_one_costs_nothing():
    model = nn.Linear(3, 3)
    for _ in range(4):
        model(torch.ones(3)).sum().backward()
        sync_gradients(model, "local", overlap=True)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
