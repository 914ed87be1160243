"""Plans as layouts from torch: shards, positions and refusals in one process, and a model's step over four."""

import pytest
import torch
from launch import torchrun

import ring_attn
from jax_core.masks.layout import shard_indices
from ring_attn import Ring
from torch_bridge.backends import shared_memory


class OneOfFour:
    """A ring that sends nothing, seen by its rank 1."""

    size, rank, ranks_here = 4, 1, (1,)

    def split(self, tensor, dim):
        return tensor


PLAN = ring_attn.balance(90, 4, causal=True, documents=[50, 30], piece=2)


def test_shards_of_a_plan(monkeypatch):
    monkeypatch.setattr(shared_memory, "resolve", lambda mesh, dim: OneOfFour())
    ring, ids = Ring(layout=PLAN), torch.arange(90)[None]
    held = torch.tensor(shard_indices(PLAN, 1, 4, 96))
    assert torch.equal(ring.positions(90), held)
    batch = ring.shard_batch(ids, ids)
    assert torch.equal(batch.position_ids[0], held.clamp_max(89))
    real = held < 90
    assert torch.equal(batch.input_ids[0], torch.where(real, held, 0))
    assert torch.equal(batch.labels[0], torch.where(held < 89, held + 1, -100))
    assert torch.equal(batch.segment_ids[0], torch.where(real, 0, -1))
    whole = torch.randn(3, 96, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(ring.shard(whole), whole[:, held])
    for given, words in (
        (whole[:, :90], "got 90 in dim 1; pad it to 96"),
        (torch.zeros(1, 192, 1), "is for 96 positions, got 192"),
    ):
        with pytest.raises(ValueError, match=words):
            ring.shard(given)


def test_a_ring_of_one():
    plan = ring_attn.balance(90, Ring("local"), causal=True, piece=4)
    whole = torch.randn(1, 92, 3)
    assert plan.length == 92
    assert torch.equal(ring_attn.unshard(ring_attn.shard(whole, "local", layout=plan), "local", layout=plan), whole)
    with pytest.raises(ValueError, match="is for a ring of 4, and this is a ring of 1"):
        ring_attn.shard(torch.zeros(1, 96, 1), "local", layout=PLAN)
    with pytest.raises(ValueError, match="shard_packed places documents itself"):
        ring_attn.shard_packed({"input_ids": torch.zeros(1, 8, dtype=torch.int64)}, Ring("local", layout=plan))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's, of every Function
def test_compiled_in_one_graph():
    plan = ring_attn.balance(64, 1, causal=True, piece=8)
    ring, q = Ring("local", layout=plan), torch.randn(1, 64, 2, 8)

    def attend(q):
        return ring.attention(q, q, q, causal=True)

    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q), attend(q))


@pytest.mark.slow
def test_a_step_over_four_processes():
    torchrun("plan_worker.py", 4)
