"""One rank of the test of plans as layouts. Run by test_balancing.py under torch.distributed.run, on four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ring_attn
from ring_attn import Ring, RingAttention, cross_entropy, ring_attention, shard_batch, start, sync_gradients, total_loss

DOCUMENTS, LENGTH, VOCABULARY, WIDTH = [31, 2, 9, 40], 85, 17, 8
ENDS = torch.tensor([0, 31, 33, 42, 82])
NUMBERS = torch.repeat_interleave(torch.arange(5), torch.tensor([*DOCUMENTS, LENGTH - 82]))[None]
SEGMENTS = NUMBERS.masked_fill(NUMBERS == 4, -1)


class Model(nn.Module):
    """An attention within documents, between embeddings of tokens and positions and a head."""

    def __init__(self, ring, **options):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(128, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.attention = RingAttention(WIDTH, 2, batch_first=True, causal=True, ring=ring, **options)

    def forward(self, batch):
        x = self.tokens(batch.input_ids) + self.places(batch.position_ids)
        return self.head(x + self.attention(x, x, x, q_segment_ids=batch.segment_ids)[0])


def model(ring, **options):
    torch.manual_seed(0)
    return Model(ring, **options).double()


def check_a_step_is_that_of_one_process(plan):
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    whole, whole_batch = model(Ring("local")), shard_batch(ids, segment_ids=SEGMENTS, mesh="local")
    expected = whole(whole_batch)
    loss = nn.functional.cross_entropy(expected.flatten(0, 1), whole_batch.labels.flatten())
    loss.backward()
    ring = Ring(layout=plan)
    batch = ring.shard_batch(ids, segment_ids=SEGMENTS)
    assert batch.input_ids.shape[1] == plan.length // 4
    for strategy in ("ring", "all_gather"):
        ours = model(ring, strategy=strategy)
        logits = ours(batch)
        share = cross_entropy(logits, batch)
        share.backward()
        sync_gradients(ours, ring=ring)
        real = SEGMENTS[0] >= 0
        found = ring.unshard(logits.detach(), length=LENGTH)
        torch.testing.assert_close(found[:, real], expected.detach()[:, real], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(total_loss(share, ring=ring), loss.detach(), rtol=1e-12, atol=1e-12)
        for (name, own), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-11, atol=1e-11, msg=name)


def check_packed_calls(plan):
    """``cu_seqlens`` of the whole sequence go with a plan as with any layout."""
    q, k, v = torch.randn(3, plan.length, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options = dict(qkv_format="thd", cu_seqlens_q=ENDS, causal=True)
    expected = ring_attention(q, k, v, mesh="local", **options)
    own = (ring_attn.shard(x, dim=0, layout=plan) for x in (q, k, v))
    found = ring_attn.unshard(ring_attention(*own, layout=plan, **options), dim=0, layout=plan)
    torch.testing.assert_close(found[:82], expected[:82], rtol=1e-11, atol=1e-11)


def check_ranks_with_other_plans_raise_together(rank, plan):
    other = ring_attn.balance(plan.length, 4, piece=plan.piece)
    q = torch.zeros(1, plan.length // 4, 2, 8)
    with pytest.raises(ValueError, match=r"plan \w{12} of "):
        ring_attention(q, q, q, layout=other if rank == 2 else plan)


def main():
    dist.init_process_group("gloo")
    start()
    plan = ring_attn.balance(LENGTH, Ring(), causal=True, documents=torch.tensor(DOCUMENTS), piece=4)
    assert plan == ring_attn.balance(LENGTH, causal=True, cu_seqlens=ENDS, piece=4)
    check_a_step_is_that_of_one_process(plan)
    check_packed_calls(plan)
    check_ranks_with_other_plans_raise_together(dist.get_rank(), plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
