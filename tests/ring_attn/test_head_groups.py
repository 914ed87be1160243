"""Attention a group of heads at a time, against all at once. Over rings: attention_worker.py."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_attn import Explaining, RingAttention, explain, keep_attention, ring_attention

HEADS, KV_HEADS, TOKENS, DIM = 8, 4, 24, 8


def later_heads_look_back(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (head < 5) | (k_pos <= q_pos)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES: dict[str, Any] = {
    "plain": dict,
    "causal, window, cap, sinks": lambda: dict(causal=True, sliding_window=(9, 0), softcap=2.0, sinks=normal(HEADS)),
    "shared sinks, as many as a group has heads": lambda: dict(sinks=normal(HEADS // 2)),
    "several sinks, bias of heads": lambda: dict(sinks=normal(HEADS, 3), bias=normal(2, HEADS, TOKENS, TOKENS)),
    "bias of all heads": lambda: dict(bias=normal(2, 1, TOKENS, TOKENS)),
    "mask": lambda: dict(mask=torch.rand(1, HEADS, TOKENS, TOKENS) > 0.3),
    "slopes, segments": lambda: dict(alibi_slopes=normal(HEADS).abs(), q_segment_ids=torch.arange(TOKENS) // 7, causal=True),
    "slopes of each entry": lambda: dict(alibi_slopes=normal(2, HEADS).abs()),
    "mask function of later heads": lambda: dict(mask_mod=later_heads_look_back),
}


def operands(qkv_format: str = "bshd", kv_heads: int = KV_HEADS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, TOKENS, HEADS, DIM), (2, TOKENS, kv_heads, DIM), (2, TOKENS, kv_heads, DIM + 2)]
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[qkv_format]
    return [normal(*shape).permute(order).contiguous() for shape in shapes]


def results(given: list[Tensor], options: dict[str, Any], **more: Any) -> list[Tensor]:
    """The output, the LSE, and the gradient of each operand that has one."""
    tensors = [x.clone().requires_grad_() for x in given]
    learned = {name: x.clone().requires_grad_() for name, x in options.items() if isinstance(x, Tensor) and x.is_floating_point()}
    out, lse = ring_attention(*tensors, mesh="local", return_lse=True, **{**options, **learned, **more})
    wanted = [*tensors, *learned.values()]
    return [out, lse, *torch.autograd.grad((out.square().sum() + lse.clamp_min(-1e9).sin().sum()), wanted)]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_all_heads(case):
    given = operands()
    options = CASES[case]()
    plain = results(given, options)
    for groups in (2, 4) if case == "plain" else (2,):
        torch.testing.assert_close(results(given, options, head_groups=groups), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("qkv_format", ["bhsd", "sbhd"])
def test_formats(qkv_format):
    given = operands(qkv_format)
    plain, own = (results(given, {"qkv_format": qkv_format, "causal": True}, head_groups=groups) for groups in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(own, plain, strict=True))


def test_packed_documents():
    given = [x.flatten(0, 1) for x in operands()]
    options = dict(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 11, 30, 41]), causal=True)
    torch.testing.assert_close(results(given, options, head_groups=2), results(given, options))


def test_the_memory_of_a_call_is_that_of_a_group():
    """What a pass holds beside its operands and results."""
    with Explaining(run=False) as calls:
        q, k, v = operands()
        ring_attention(q, k, v, mesh="local", head_groups=4)
    (shapes,) = calls.found
    assert f"[2, {TOKENS}, {HEADS // 4}, {DIM}]" in shapes
    assert str(explain(q, k, v, mesh="local", head_groups=4)) == str(explain(q[:, :, :2], k[:, :, :1], v[:, :, :1], mesh="local"))


def test_a_checkpoint_keeps_each_group():
    given = [x.requires_grad_() for x in operands()]
    attend = partial(ring_attention, mesh="local", causal=True, head_groups=2)
    found = []
    for options in ({}, {"context_fn": keep_attention}):
        out = checkpoint(lambda *qkv: attend(*qkv) * 1, *given, use_reentrant=False, **options)
        found.append(torch.autograd.grad(out.square().sum(), given))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_module():
    found = []
    for groups in (1, 2):
        torch.manual_seed(0)
        module = RingAttention(32, 4, batch_first=True, num_kv_heads=2, sinks=True, mesh="local", causal=True, head_groups=groups)
        x = torch.randn(2, TOKENS, 32)
        module(x, x, x)[0].square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*found)


def test_what_is_refused():
    q, k, v = operands()
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="head_groups must be a positive int"):
            ring_attention(q, k, v, mesh="local", head_groups=wrong)
    with pytest.raises(ValueError, match="head_groups must divide the K/V heads, 4 of 8 heads here; got 8"):
        ring_attention(q, k, v, mesh="local", head_groups=8)
    with pytest.raises(NotImplementedError, match="dropout_p with head_groups"):
        ring_attention(q, k, v, mesh="local", head_groups=2, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="mask_builder with head_groups"):
        ring_attention(q, k, v, mesh="local", head_groups=2, mask_builder=lambda *_: None)
    with pytest.raises(ValueError, match="qkv_format must be one of"):
        ring_attention(q, k, v, mesh="local", head_groups=2, qkv_format="hbsd")
    with pytest.raises(ValueError, match="v must be a torch"):
        ring_attention(q, k, [v], mesh="local", head_groups=2)
