"""``replace_attention``: what it swaps and leaves here, and one process beside two in workers/replace_worker.py."""

import copy

import pytest
import torch
from launch import torchrun
from torch import nn
from torch.nn.utils import parametrize, prune

from ring_attn import RingAttention, replace_attention

E, H, L = 8, 2, 6


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2)


def test_objects_stay_and_compute_the_same():
    model = encoder().train()
    model.layers[0].self_attn.eval()
    parameters, modules, state = list(model.parameters()), list(model.modules()), copy.deepcopy(model.state_dict())
    seen = []
    model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append("hook"))
    x = noise(2, L, E)
    expected = model(x)
    report = replace_attention(model, mesh="local")
    assert report == (("layers.0.self_attn", "layers.1.self_attn"), {})
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [layer.self_attn.training for layer in model.layers] == [False, True]
    assert all(type(layer.self_attn) is RingAttention for layer in model.layers)
    seen.clear()
    torch.testing.assert_close(model(x), expected)
    assert seen == ["hook"]
    model.load_state_dict(state, strict=True)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), expected)
    assert repr(model.layers[0].self_attn).startswith("RingAttention(")


def test_the_model_itself_and_every_size():
    torch.manual_seed(0)
    for options in ({"kdim": 5, "vdim": 7}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True}):
        model = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
        tensors = [noise(2, L, size, seed=size) for size in (E, model.kdim, model.vdim)]
        expected = model(*tensors, need_weights=False)[0]
        assert replace_attention(model, mesh="local").swapped == ("",)
        torch.testing.assert_close(model(*tensors)[0], expected)
        model(*tensors)[0].sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_nested_tensors_and_no_fused_path():
    model, x = encoder().eval(), noise(2, L, E)
    padding = torch.zeros(2, L, dtype=torch.bool)
    padding[1, 4:] = True
    replace_attention(model, mesh="local")
    with torch.no_grad():
        actual = model(x, src_key_padding_mask=padding)
    expected = encoder()
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(actual, expected(x, src_key_padding_mask=padding))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Own(nn.MultiheadAttention):
    pass


def test_what_is_left_is_said():
    made = lambda: nn.MultiheadAttention(E, H)  # noqa: E731
    names = "plain own parametrized pruned patched asked again twice"
    model = nn.ModuleDict({name: made() for name in names.split()})
    model["own"], model["twice"] = Own(E, H), model["plain"]
    parametrize.register_parametrization(model["parametrized"], "in_proj_weight", Doubled())
    prune.l1_unstructured(model["pruned"], "in_proj_weight", 2)
    model["patched"].forward = lambda *_: None
    model["quantizable"] = torch.ao.nn.quantizable.MultiheadAttention(E, H)
    replace_attention(model["again"], mesh="local")
    swapped, left = replace_attention(model, mesh="local", leave=["asked"])
    assert swapped == ("plain",)  # once, though it is there twice
    reasons = {
        "own": "a Own",
        "parametrized": "a ParametrizedMultiheadAttention",
        "pruned": "no plain parameter",
        "patched": "a forward of its own",
        "asked": "named in leave",
        "again": "already",
        "quantizable": "not nn.MultiheadAttention itself",
    }
    assert left.keys() == reasons.keys()
    assert all(words in left[name] for name, words in reasons.items()), left
    assert type(model["own"]) is Own and type(model["asked"]) is nn.MultiheadAttention


def test_calls_that_cannot_be_are_refused():
    model = encoder()
    with pytest.raises(ValueError, match=r"leave must hold names .*got \['layers.7'\]"):
        replace_attention(model, mesh="local", leave=["layers.7"])
    replace_attention(model, mesh="local")
    x = noise(2, L, E)
    with pytest.raises(NotImplementedError, match="attention weights"):
        model.layers[0].self_attn(x, x, x, need_weights=True)


@pytest.mark.slow
def test_two_processes_give_what_one_gives():
    assert "replace worker: all right" in torchrun("replace_worker.py", 2)
