"""``Ring`` holds what calls on one ring must agree on; its methods are the functions with these fixed."""

import pytest
import torch

from ring_attn import Ring, RingAttention, pad, positions, ring_attention, sdpa, shard_batch


def test_methods_are_the_functions_of_their_names():
    ring = Ring("local", layout="zigzag")
    q = torch.randn(1, 8, 2, 4)
    assert ring.size == 1 and ring.rank == 0 and ring.group is None
    assert torch.equal(ring.attention(q, q, q, causal=True), ring_attention(q, q, q, causal=True, mesh="local", layout="zigzag"))
    assert torch.equal(ring.positions(8), positions(8, "local", layout="zigzag"))
    assert torch.equal(ring.unshard(ring.shard(ring.pad(q))), q)
    ids = torch.arange(8)[None]
    ours, theirs = ring.shard_batch(ids), shard_batch(ids, mesh="local", layout="zigzag")
    assert all(torch.equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))


def test_a_ring_rounds_lengths_up_to_its_buckets():
    tokens = torch.arange(1000)[None]
    for buckets, padded in ((8, 1024), (16, 1024), (32, 1008), (0, 1000)):
        ring = Ring("local", buckets=buckets)
        batch = ring.shard_batch(tokens)
        assert {ring.pad(tokens).shape[1], len(ring.positions(1000)), batch.input_ids.shape[1]} == {padded}
        assert torch.equal(ring.unshard(batch.input_ids, length=batch.length), tokens)
        assert ring.shard_batch(tokens, buckets=4).input_ids.shape[1] == 1024
    assert Ring("local") == Ring("local", buckets=8) and pad(tokens, "local", buckets=8).shape[1] == 1024
    with pytest.raises(ValueError, match="buckets must be a number of lengths an octave"):
        Ring("local", buckets=-1)


def test_a_module_takes_a_ring_or_its_parts():
    module = RingAttention(8, 2, ring=Ring("local", layout="striped"))
    assert (module.mesh, module.mesh_dim, module.layout) == ("local", None, "striped")
    with pytest.raises(ValueError, match="give either ring"):
        RingAttention(8, 2, ring=Ring("local"), layout="zigzag")
    with pytest.raises(ValueError, match=r"ring must be a ring_attn\.Ring, got str"):
        RingAttention(8, 2, ring="local")


def test_a_strategy_goes_with_the_ring():
    ring, q = Ring("local", strategy="spiral"), torch.randn(1, 8, 2, 4)
    module = RingAttention(8, 2, ring=ring, batch_first=True)
    x = torch.randn(1, 8, 8)
    calls = [
        lambda: ring.attention(q, q, q),
        lambda: module(x, x, x),
        lambda: sdpa(*[q.transpose(1, 2)] * 3, ring=ring),
        lambda: RingAttention(8, 2, strategy="spiral", ring=Ring("local", strategy="ring"))(x, x, x),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"strategy must be one of .* got 'spiral'"):
            call()
    assert torch.equal(ring.attention(q, q, q, strategy="ring"), ring_attention(q, q, q, mesh="local"))
    assert RingAttention(8, 2, ring=Ring("local", strategy="ring")).strategy == "ring"


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout"):
        Ring("local", layout="spiral")
