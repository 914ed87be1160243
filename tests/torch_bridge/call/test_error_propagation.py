"""Which errors of this rank the others are told, and when this process counts as busy."""

import pytest
import torch
import torch.utils.checkpoint

import ring_attn
from torch_bridge.call import error_propagation
from torch_bridge.failures import peers
from torch_bridge.mesh.rings import ProcessRing

RING = ProcessRing((0, 1), 0)


@pytest.fixture
def told(monkeypatch):
    errors: list[Exception] = []
    monkeypatch.setattr(error_propagation, "start", lambda *_, **__: None)
    monkeypatch.setattr(error_propagation, "resolve", lambda *_: RING)
    monkeypatch.setattr(error_propagation, "tell_failure", lambda ring, error: errors.append(error))
    return errors


def x():
    return torch.ones(1, 4, 2, 8, requires_grad=True)


def test_an_invalid_call_is_told(told):
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        ring_attn.ring_attention(torch.ones(2, 2), x(), x())
    assert len(told) == 1


def test_the_early_stop_of_checkpointing_is_no_failure(told):
    """It ends a recomputation as soon as all is there that the backward needs: in the saving hooks of the attention's tensors."""

    def last_saves(q):
        return ring_attn.ring_attention(q * 2, q, q, mesh="local")

    q = x()
    torch.utils.checkpoint.checkpoint(last_saves, q, use_reentrant=False).sum().backward()
    assert q.grad is not None
    assert told == []


def test_a_call_that_may_hold_its_mesh_in_the_wrong_place_is_not_told(told):
    with pytest.raises(TypeError, match="positional"):
        ring_attn.ring_attention(x(), x(), x(), "local")
    assert told == []


def test_an_error_while_telling_hides_nothing(told, monkeypatch):
    def fails(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(error_propagation, "start", fails)
    with pytest.raises(ValueError, match="q must have 4 dimensions") as error:
        ring_attn.ring_attention(torch.ones(2, 2), x(), x())
    assert "could not be told: no route" in error.value.__notes__[0]


@pytest.mark.parametrize("file", ["torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py"])
def test_who_compiles_is_busy(file):
    assert not peers._compiles()
    scope = {"peers": peers}
    exec(compile("def inside():\n    return peers._compiles()", file, "exec"), scope)
    assert scope["inside"]()
