"""Decoding by Triton's own launches, in Triton's interpreter, against the float64 oracle: with TRITON_INTERPRET=1, in a process of
its own. On GPUs: tests/gpu/test_rings.py."""

from typing import Any

import pytest
import torch
from decoding_cases import BATCH, CASES, arrays, check
from launch import torchrun

import ring_attn
from jax_core.config import FwdParams, RingAttentionConfig
from torch_bridge.attention import decoding
from torch_bridge.attention.append import append, append_at_once
from torch_bridge.call import call_cache, programs


@pytest.fixture(autouse=True)
def launched_by_torch(monkeypatch):
    programs._PROGRAMS.clear()
    call_cache.clear()
    monkeypatch.setattr(decoding, "launches", lambda *_: True)
    monkeypatch.setattr(decoding, "_SHORTEST_PART", 16)
    yield
    programs._PROGRAMS.clear()
    call_cache.clear()


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_oracles(name: str):
    case = CASES[name]
    given = arrays(case)
    out, lse = ring_attn.ring_attention(**given, **case.options, strategy="decode", return_lse=True)
    (made,) = programs._PROGRAMS.values()
    assert isinstance(made.program, decoding.Decoding)
    check(case, given, out, lse)


def test_gradients_are_jaxs():
    given = arrays(CASES["sinks"])
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    out = ring_attn.ring_attention(**given, strategy="decode")
    found = torch.autograd.grad(out.square().sum(), tuple(leaves.values()))
    programs._PROGRAMS.clear()
    call_cache.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "launches", lambda *_: False)
        wanted = torch.autograd.grad(ring_attn.ring_attention(**given, strategy="decode").square().sum(), tuple(leaves.values()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_ids_of_one_side_may_be_shared():
    case = CASES["several, in order"]
    given = arrays(case)
    given |= {name: given[name][:1].contiguous() for name in ("kv_segment_ids", "kv_position_ids")}
    out, lse = ring_attn.ring_attention(**given, **case.options, strategy="decode", return_lse=True)
    (made,) = programs._PROGRAMS.values()
    assert not isinstance(made.program, decoding.Decoding)
    whole = {name: x.expand(BATCH, -1) if name.startswith("kv_") else x for name, x in given.items()}
    check(case, whole, out, lse)


def seen_at_even_places(batch, head, q_pos, k_pos):
    return k_pos % 2 == 0


@pytest.mark.parametrize(
    "different",
    [{"mask_mod": seen_at_even_places}, {"dtype": torch.float64}, {"cfg": RingAttentionConfig(FwdParams(kv_blocksize=32))}],
    ids=["mask function", "float64", "tiles"],
)
def test_what_is_left_to_jax(different: dict[str, Any]):
    given = arrays(CASES["several, in order"])
    given |= {name: given[name].to(different.get("dtype", torch.float32)) for name in "qkv"}
    options = {name: value for name, value in different.items() if name != "dtype"}
    ring_attn.ring_attention(**given, **options, causal=True, strategy="decode")
    (made,) = programs._PROGRAMS.values()
    assert not isinstance(made.program, decoding.Decoding)


@pytest.mark.parametrize(("tokens", "dims"), [(1, (128, 128)), (5, (24, 40))])
def test_new_tokens_are_kept_where_they_belong(tokens: int, dims: tuple[int, int]):
    """To the bit, from views of a wider tensor as from tensors of their own; what is beside them stays."""
    slots, heads = 300, 3
    held = tuple(torch.randn(2, slots, heads, dim) for dim in dims)
    places = torch.randperm(slots)[:tokens]
    wide = torch.randn(2, tokens, heads * sum(dims))
    new = tuple(x.unflatten(-1, (heads, -1)) for x in wide.split([heads * dim for dim in dims], -1))
    apart = tuple(torch.stack([x, -x], -1).flatten(-2)[..., ::2] for x in new)  # in memory of twice the stride
    turned = tuple(x.flatten(2).mT.contiguous().mT.unflatten(-1, (heads, -1)) for x in new)
    for given in (new, apart, turned, tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in new)):
        found, wanted = ([x.clone() for x in held] for _ in range(2))
        append_at_once(tuple(found), given, places)
        append(tuple(wanted), given, places)
        assert all(map(torch.equal, found, wanted))


def test_a_part_is_joined_among_zeros():
    """What GPUs add that read each other's memory, whatever was there before."""
    parts = torch.randn(5, 6, 9)  # of two queries of three heads
    memory, alone = torch.full((3, 6, 9), torch.nan), torch.empty(1, 6, 9)
    decoding._join(parts, (1, 3, 2), None, (memory,), rank=1)
    decoding._join(parts, (1, 3, 2), None, (alone,))
    assert torch.equal(memory[1], alone[0]) and not memory[0].any() and not memory[2].any()
    weights = parts[..., 8:].softmax(0)
    torch.testing.assert_close(alone[0, :, :8], (parts[..., :8] * weights).sum(0))
    torch.testing.assert_close(alone[0, :, 8], parts[..., 8].logsumexp(0))


def test_on_a_ring_each_rank_has_a_part():
    torchrun("decoding_worker.py", 2, TRITON_INTERPRET="1")
