"""Activation checkpoints hand out once what was saved: a call whose program is there from an earlier one must not look twice."""

import contextlib
import gc

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


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def tensors_in_circles():
    """Tensors that only Python's garbage collection would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    return [type(x).__name__ for x in gc.garbage if isinstance(x, torch.Tensor)]


@pytest.mark.costly
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_leaves_no_tensor_to_the_garbage_collection(reentrant: bool):
    """The exception by which a recomputation stops must not be held by a frame of the call that it went through: every layer's
    recomputed tensors would stay until the collection, and memory would be that of no checkpoint at all."""
    q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    x = q
    for _ in range(3):
        x = checkpoint(lambda x: ring_attention(x * 1, k * 1, v * 1, mesh="local"), x, use_reentrant=reentrant)
    x.sum().backward()
    del x
    assert tensors_in_circles() == []


@pytest.mark.costly
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("wrong", [{"sliding_window": -7}, {"is_causal_": True}], ids=["value", "name"])
def test_an_error_leaves_no_tensor_to_the_garbage_collection(wrong):
    tensors = [torch.randn(1, 8, 2, 4) for _ in range(3)]
    with contextlib.suppress(ValueError, TypeError):
        ring_attention(*tensors, mesh="local", **wrong)
        pytest.fail("nothing was refused")
    del tensors
    assert tensors_in_circles() == []
