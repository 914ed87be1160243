"""Where what all ranks hold alike is compared. What is found: tests/integrations/test_mistakes.py, on two processes."""

import pytest
import torch
from torch import nn

from ring_attn.training import shared_state
from torch_bridge.mesh.rings import ProcessRing


@pytest.mark.parametrize(
    ("backend", "inputs", "weights", "wanted"),
    [
        ("nccl", "cpu", "cpu", "cuda:3"),  # offloaded weights, and inputs that a wrapper of the model will move
        ("gloo", "cpu", "cpu", "cpu"),
        ("undefined", "cpu", "meta", "meta"),  # one for each device: the model's decides
        ("undefined", "meta", "cpu", "meta"),
    ],
)
def test_collectives_take_tensors_from_where_they_can(monkeypatch, backend, inputs, weights, wanted):
    monkeypatch.setattr(shared_state.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    ring = ProcessRing((0, 1), 0, groups=(object(),))
    found = shared_state._sending_device(ring, torch.empty(0, device=inputs), nn.Linear(1, 1, device=weights))
    assert found == torch.device(wanted)
