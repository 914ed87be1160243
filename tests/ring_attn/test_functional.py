"""What the torch face takes and says: numbers, names, empty tensors, strategies, and the types that a checker sees."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ring_attn
from ring_attn.functional import NAMES, AttentionOptions
from ring_attn.module.attention import _NAMES as MODULE_NAMES
from torch_bridge.backends import shared_memory

ROOT = Path(__file__).parents[2]


def qkv(batch=2, length=16, keys=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    keys = length if keys is None else keys
    shapes = (batch, length, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"sliding_window": np.int64(4)}, {"sliding_window": 4}),
        ({"sliding_window": (np.int32(4), np.int8(0))}, {"sliding_window": (4, 0)}),
        ({"chunk_size": np.int64(5)}, {"chunk_size": 5}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.int64(2)}, {"scale": 2.0}),
        ({"softcap": np.float64(3)}, {"softcap": 3}),
        ({"dropout_p": np.float32(0.5), "dropout_seed": np.int64(7)}, {"dropout_p": 0.5, "dropout_seed": 7}),
        ({"cfg": ring_attn.RingAttentionConfig(ring_attn.FwdParams(np.int64(8), np.int32(8)))}, {}),
    ],
)
def test_numpys_numbers_are_numbers(given, plain):
    inputs = qkv()
    got, expected = ring_attn.ring_attention(*inputs, **given), ring_attn.ring_attention(*inputs, **plain)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [{"sliding_window": np.float64(4)}, {"sliding_window": (4.0, 0)}, {"chunk_size": np.bool_(True)}, {"scale": np.bool_(True)}],
)
def test_other_things_of_numpy_are_none(bad):
    ring_attn.ring_attention(*qkv(), sliding_window=4)  # an equal number that is none must not find this one's program
    with pytest.raises(ValueError, match=next(iter(bad))):
        ring_attn.ring_attention(*qkv(), **bad)


def bad_calls():
    """For each name that the core has another for, a call that it refuses."""
    q, k, v = (x.detach() for x in qkv())
    return {
        "q": dict(q=q[..., :7]),
        "k": dict(k=k.double(), q=q.double(), v=v.double()[:, :3]),
        "v": dict(v=v.half()),
        "sinks": dict(sinks=torch.zeros(3, 2)),
        "softcap": dict(softcap=-1.0),
        "scale": dict(scale=float("nan")),
        "dropout_p": dict(dropout_p=1.5),
        "ring_attn.RingAttentionConfig": dict(cfg=3),
    }


@pytest.mark.parametrize("name", NAMES.values())
def test_an_error_names_the_argument_that_was_given(name):
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=rf"\b{re.escape(name)}\b") as raised:
        ring_attn.ring_attention(**dict(q=q, k=k, v=v) | bad_calls()[name])
    assert not re.search(r"\b(" + "|".join(NAMES) + r")\b", str(raised.value))


def bad_modules():
    return {
        "sinks": lambda module: setattr(module, "sinks", torch.nn.Parameter(torch.zeros(3, 2))),
        "softcap": lambda module: setattr(module, "softcap", -1.0),
        "scale": lambda module: setattr(module, "scale", float("nan")),
        "dropout": lambda module: setattr(module, "dropout", 1.5),
        "ring_attn.RingAttentionConfig": lambda module: setattr(module, "cfg", 3),
    }


@pytest.mark.parametrize("name", MODULE_NAMES.values())
def test_so_does_one_of_the_module(name):
    module = ring_attn.RingAttention(32, 4, mesh="local", batch_first=True, sinks=name == "sinks")
    bad_modules()[name](module)
    x = torch.randn(2, 8, 32)
    if name == "sinks":  # the module gives each head its row, so what the core may refuse is their number
        module._all_sinks = lambda: torch.zeros(3, 2)
    with pytest.raises(ValueError, match=rf"\b{re.escape(name)}\b") as raised:
        module(x, x, x)
    assert not re.search(r"\b(" + "|".join(MODULE_NAMES) + r")\b", str(raised.value))
    assert not re.search(r"\b[qkv]\b", str(raised.value))


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_every_name_of_the_core_is_turned(kind, monkeypatch):
    def refuse(request):
        raise kind("; ".join(NAMES) + "; query_dim, q_position_ids, keys")

    monkeypatch.setattr(shared_memory, "program", refuse)
    with pytest.raises(kind, match=re.escape("; ".join(NAMES.values()) + "; query_dim, q_position_ids, keys")):
        ring_attn.ring_attention(*qkv(length=13))


@pytest.mark.parametrize(("batch", "length", "keys"), [(0, 4, 4), (2, 0, 0), (2, 0, 4), (2, 4, 0)])
@pytest.mark.parametrize("qkv_format", ["bshd", "bhsd"])
def test_an_empty_batch_or_sequence_gives_what_sdpa_gives(batch, length, keys, qkv_format):
    inputs = qkv(batch, length, keys)
    laid = [x.transpose(1, 2) for x in inputs]
    out = ring_attn.ring_attention(*(laid if qkv_format == "bhsd" else inputs), qkv_format=qkv_format)
    expected = F.scaled_dot_product_attention(*laid, enable_gqa=True)
    assert torch.equal(out if qkv_format == "bhsd" else out.transpose(1, 2), expected)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(4,), (3,), (4, 2)])
def test_queries_without_keys_have_the_lse_of_the_sinks(shape):
    inputs = qkv(keys=0, dtype=torch.float64)
    sinks = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, lse = ring_attn.ring_attention(*inputs, sinks=sinks, return_lse=True)
    each = sinks[:, None] if shape == (4,) else sinks.expand(4, -1)
    expected = each.logsumexp(-1)[None, :, None].expand(2, 4, 16)
    weight = torch.randn(2, 4, 16, dtype=torch.float64)
    torch.testing.assert_close(lse, expected)
    assert (out == 0).all()
    (got,), (want,) = (torch.autograd.grad((x * weight).sum(), [sinks]) for x in (lse, expected))
    torch.testing.assert_close(got, want)


def test_a_call_that_is_empty_is_checked_all_the_same():
    with pytest.raises(ValueError, match="softcap must be positive"):
        ring_attn.ring_attention(*qkv(batch=0), softcap=-1.0)
    with pytest.raises(ValueError, match="heads and a head dim"):
        ring_attn.ring_attention(*(x[..., :0] for x in qkv()))


def test_tensors_without_dense_memory_are_refused():
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=r"got meta: move them with .to\(\); for shapes alone .* FakeTensorMode"):
        ring_attn.ring_attention(*(x.to("meta") for x in (q, k, v)))
    nested = torch.nested.nested_tensor([q[0], q[1][:4]], layout=torch.jagged)
    with pytest.raises(ValueError, match="q must be a dense tensor, got a nested one; pad it"):
        ring_attn.ring_attention(nested, k, v)
    with pytest.raises(ValueError, match=r"k must be a dense tensor, got layout torch.sparse_coo; call .to_dense"):
        ring_attn.ring_attention(q, k.to_sparse(), v)


def test_strategies_by_name():
    inputs = qkv()
    assert torch.equal(ring_attn.ring_attention(*inputs, strategy="ring"), ring_attn.ring_attention(*inputs))
    with pytest.raises(NotImplementedError, match='strategy="fused": a ring of one rank sends nothing'):
        ring_attn.ring_attention(*inputs, strategy="fused")
    with pytest.raises(ValueError, match=r"strategy must be one of auto, ring, fused, .*; got 'spiral'"):
        ring_attn.ring_attention(*inputs, strategy="spiral")


def test_cudnn_is_another_name_of_cuda():
    assert ring_attn.RingAttentionConfig(platform="cudnn") == ring_attn.RingAttentionConfig(platform="cuda")
    for options in (dict(platform="cudnn"), dict(cfg=ring_attn.RingAttentionConfig(platform="cudnn"))):
        with pytest.raises(NotImplementedError, match='platform="cuda"'):
            ring_attn.ring_attention(*qkv(), **options)


def test_what_users_need_comes_by_one_import_and_loads_no_jax():
    names = "RingAttentionConfig, FwdParams, BwdParams, PeerFailure, start, ring_attention, RingAttention"
    code = f"import sys\nfrom ring_attn import {names}\nassert not {{'jax', 'jaxlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_the_types_speak_of_the_functions_own_arguments():
    parameters = inspect.signature(ring_attn.ring_attention).parameters
    assert [*AttentionOptions.__annotations__, "return_lse"] == sorted(
        [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY],
        key=[*AttentionOptions.__annotations__, "return_lse"].index,
    )
    for name, kind in AttentionOptions.__annotations__.items():
        assert parameters[name].annotation == getattr(kind, "__forward_arg__", kind)


def test_settings_that_cannot_be_hashed_are_refused_in_words():
    class Builder:
        __hash__ = None

        def __call__(self, *_):
            return np.ones((4, 4), bool)

    x = torch.ones(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"cfg must be a ring_attn.RingAttentionConfig or None, got dict"):
        ring_attn.ring_attention(x, x, x, cfg={}, mesh="local")
    with pytest.raises(ValueError, match=r"mask_builder must be hashable, .* got Builder"):
        ring_attn.ring_attention(x, x, x, mask_builder=Builder(), mesh="local")


def test_the_module_refuses_sparse_tensors_and_slopes_that_are_no_tensor():
    module = ring_attn.RingAttention(8, 2, batch_first=True)
    x = torch.ones(1, 4, 8)
    with pytest.raises(ValueError, match=r"key must be a dense tensor, got layout torch.sparse_coo"):
        module(x, x.to_sparse(), x)
    with pytest.raises(ValueError, match=r"alibi_slopes must be a tensor \[num_heads\] = \[2\], got list"):
        ring_attn.RingAttention(8, 2, alibi_slopes=[0.5, 0.25])


def test_torchs_switch_asks_for_the_same_bits():
    q = torch.randn(1, 16, 2, 8)
    before = ring_attn.ring_attention(q, q, q, mesh="local")
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(ring_attn.ring_attention(q, q, q, mesh="local"), before, rtol=0, atol=0)
        for named in (dict(platform="cuda"), dict(strategy="fused")):
            with pytest.raises(NotImplementedError, match="deterministic=True"):
                ring_attn.ring_attention(q, q, q, mesh="local", **named)
    finally:
        torch.use_deterministic_algorithms(False)
