"""Activation checkpointing that keeps attention: no forward runs twice, and gradients have the bits of full recomputation."""

import gc
import weakref
from functools import partial

import pytest
import torch
from launch import torchrun
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_attn import RingAttention, keep_attention, ring_attention
from ring_attn.training.checkpoint import KeepingAttention
from torch_bridge.backends import compiled

LAYERS = 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = RingAttention(32, 4, causal=True, batch_first=True, dropout=0.1)
        self.mlp = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.mlp(torch.tanh(self.attention(x, x, x, need_weights=False)[0]))


@pytest.fixture
def calls(monkeypatch):
    """The programs that run: forwards and backwards."""
    counted = {"forward": 0, "backward": 0}
    run = compiled.CompiledProgram._run

    def counting(self, step, *arguments):
        counted[step] += 1
        return run(self, step, *arguments)

    monkeypatch.setattr(compiled.CompiledProgram, "_run", counting)
    return counted


WAYS = {
    "full": partial(checkpoint, use_reentrant=False),
    "kept": partial(checkpoint, use_reentrant=False, context_fn=keep_attention),
    "offloaded": partial(checkpoint, use_reentrant=False, context_fn=partial(keep_attention, offload=True)),
    "late": partial(checkpoint, use_reentrant=False, context_fn=keep_attention, early_stop=False),
    "kept, wrapped": lambda layer, x: checkpoint(KeepingAttention(layer), x, use_reentrant=False),
    "kept, reentrant": lambda layer, x: checkpoint(KeepingAttention(layer), x, use_reentrant=True),
}


def model():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS)), torch.randn(2, 16, 32, requires_grad=True)


def gradients(way, layers, x, retained=False, autocast=False):
    torch.manual_seed(1)
    layers.zero_grad()
    x.grad = None
    y = x
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for layer in layers:
            y = way(layer, y)
    loss = y.float().square().sum()
    if retained:
        loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad.clone(), *(parameter.grad.clone() for parameter in layers.parameters())]


def same_bits(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("retained", [False, True], ids=["once", "retained"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "full"])
def test_no_forward_runs_twice(calls, way, retained, autocast):
    expected = gradients(WAYS["full"], *model(), retained, autocast)
    assert calls["forward"] == LAYERS * (3 if retained else 2)
    calls.update(forward=0, backward=0)
    assert same_bits(gradients(WAYS[way], *model(), retained, autocast), expected)
    assert calls == {"forward": LAYERS, "backward": LAYERS * (2 if retained else 1)}


def test_several_calls_and_checkpoints_in_checkpoints(calls):
    layers, x = model()

    def both(inner, layers, x):
        return layers[1](inner(layers[0], x))

    def outer(way, inner):
        return lambda layer, y: way(partial(both, inner, [layer, layer]), y)

    plain = WAYS["full"]
    expected = gradients(outer(plain, plain), layers, x)
    for way in ("kept", "kept, wrapped", "kept, reentrant"):
        calls.update(forward=0, backward=0)
        assert same_bits(gradients(outer(WAYS[way], WAYS[way]), layers, x), expected)
        assert calls == {"forward": 2 * LAYERS, "backward": 2 * LAYERS}
    calls.update(forward=0, backward=0)
    assert same_bits(gradients(outer(WAYS["kept"], plain), layers, x), expected)
    assert calls["forward"] == 3 * LAYERS  # the inner one's second run is nobody's


def qkv():
    torch.manual_seed(0)
    return [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)]


def test_other_calls_in_the_second_run_are_refused():
    turns = []

    def function(q, k, v):
        turns.append(0)
        return ring_attention(q, k, v, mesh="local", causal=len(turns) == 1)

    out = checkpoint(function, *qkv(), use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(RuntimeError, match=r"must be those of the first run.*call 1 was ring_attention of \[\[1, 8, 2, 4\]"):
        out.sum().backward()


def test_more_calls_in_the_second_run_are_refused():
    turns = []

    def function(q, k, v):
        turns.append(0)
        out = ring_attention(q, k, v, mesh="local")
        return ring_attention(out, k, v, mesh="local") if len(turns) > 1 else out * 1

    out = checkpoint(function, *qkv(), use_reentrant=False, context_fn=keep_attention, early_stop=False, determinism_check="none")
    with pytest.raises(RuntimeError, match=r"call 2 was none, and is ring_attention of"):
        out.sum().backward()


def test_a_kept_result_that_was_changed_in_place_is_refused():
    def function(q, k, v):
        out = ring_attention(q, k, v, mesh="local")
        with torch.no_grad():
            out.detach().add_(1)
        return out * 2

    out = checkpoint(function, *qkv(), use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_second_run_that_fails_leaves_nothing_behind(calls):
    turns = []

    def function(q, k, v):
        turns.append(0)
        if len(turns) == 2:
            raise KeyError("in the middle")
        return ring_attention(q, k, v, mesh="local") * 1

    out = checkpoint(function, *qkv(), use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(KeyError, match="in the middle"):
        out.sum().backward()
    calls.update(forward=0)
    ring_attention(*qkv(), mesh="local")
    assert calls["forward"] == 1


@pytest.mark.parametrize("way", ["kept", "kept, wrapped", "kept, reentrant"])
def test_nothing_is_held_after_the_backward(way, monkeypatch):
    made = []
    run = compiled.CompiledProgram._run

    def noting(self, step, *arguments):
        results = run(self, step, *arguments)
        made.extend(weakref.ref(x) for x in results if step == "forward")
        return results

    monkeypatch.setattr(compiled.CompiledProgram, "_run", noting)
    gc.disable()  # a circle would be found some day, and hold memory until then
    try:
        layers, x = model()
        y = x
        for layer in layers:
            y = WAYS[way](layer, y)
        loss = y.square().sum()
        loss.backward()
        storages = [x for x in (reference() for reference in made) if x is not None]
        assert len(made) == 2 * LAYERS and storages == []
        assert loss.grad_fn is not None  # the loss is held all the while
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.slow
@pytest.mark.parametrize("way", ["kept", "kept, reentrant"])
def test_layers_that_are_compiled(calls, way):
    """The graph has the operator, which is asked for what is kept as any call."""
    layers, x = model()
    for layer in layers:
        layer.attention.dropout = 0.0
    expected = gradients(WAYS["full"], layers, x)
    calls.update(forward=0, backward=0)
    found = gradients(WAYS[way], nn.ModuleList(torch.compile(layer) for layer in layers), x)
    assert calls == {"forward": LAYERS, "backward": LAYERS}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_over_a_ring(size):
    assert torchrun("checkpoint_worker.py", size).count("all right") == size
