"""Two ranks make the mistakes that no error shows, with a model of their own; run by test_sanity_checks.py. Each must be told, in
words that name it, and the same done right must be told nothing."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ring_attn
from ring_attn import DoubtWarning, Ring, cross_entropy, ring_attention, shard, sync_gradients, unshard
from torch_bridge.call import sanity_checks
from torch_bridge.call.sanity_checks import warn_once

WHOLE = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(17, (2, 24), generator=torch.Generator().manual_seed(1))


def heard(call: Callable[[], object]) -> str:
    """What a call raises or warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except ValueError as error:
            return f"ValueError: {error}"
    assert all(warning.category is DoubtWarning for warning in caught)
    return "; ".join(str(warning.message) for warning in caught)


def raises(words: str, call: Callable[[], object]) -> None:
    """Each time."""
    for _ in range(2):
        assert (said := heard(call)).startswith("ValueError") and words in said, f"{words!r} is not in {said!r}"


def warns(words: str, call: Callable[[], object]) -> None:
    """Once."""
    assert not (said := heard(call)).startswith("ValueError") and words in said, f"{words!r} is not in {said!r}"
    nothing(call)


def nothing(call: Callable[[], object]) -> None:
    assert not (said := heard(call)), said


def attend(x: Tensor, **options: object) -> Tensor:
    return ring_attention(x, x, x, **{"causal": True, **options})


class Model(nn.Module):
    """An attention between an embedding and a head; ``attention`` is called with ``[batch, seq, heads, dim]``."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.attention = nn.Embedding(17, 8), nn.Linear(8, 17), attention

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).unflatten(-1, (2, 4))
        return self.head(self.attention(x, x, x, causal=True).flatten(2))


def check_batches(rank: int) -> None:
    ring = Ring(layout="zigzag")
    model = Model(ring.attention)

    def step(first: Tensor, then: Tensor) -> None:
        model.zero_grad()
        for ids in (first, then):
            batch = ring.shard_batch(ids)
            cross_entropy(model(batch.input_ids), batch).backward()
        sync_gradients(model, ring=ring)

    raises("have sharded different batches", lambda: step(IDS.roll(rank, 1), IDS))
    nothing(lambda: step(IDS, IDS))
    raises("losses of different batches", lambda: step(IDS, IDS.roll(rank, 1)))
    if rank:
        ring.shard_batch(IDS.flip(0))  # a rank may look at one alone
    nothing(lambda: step(IDS, IDS.flip(1)))


def check_packed_batches(rank: int) -> None:
    """By what each rank has packed, of its own order or with the documents of another."""
    ring, counts = Ring(layout="striped", buckets=0), torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)

    def step(first: Tensor, then: Tensor, positions: Tensor = counts) -> None:
        sanity_checks._batches.clear()  # this ring's ranks have had batches in common
        for ids in (first, then):
            batch = ring_attn.shard_packed({"input_ids": ids, "position_ids": positions}, ring)
            model = Model(partial(ring.attention, **batch.attention))
            cross_entropy(model(batch.input_ids), batch).backward()
        sync_gradients(model, ring=ring)

    raises("have sharded different batches", lambda: step(IDS.roll(rank, 1), IDS))
    raises("have sharded different batches", lambda: step(IDS, IDS, counts if rank else torch.arange(24)))
    nothing(lambda: step(IDS, IDS))
    raises("losses of different batches", lambda: step(IDS, IDS.roll(rank, 1)))
    nothing(lambda: step(IDS, IDS.flip(1)))


def check_losses() -> None:
    ring, other = Ring(layout="zigzag"), Ring(layout="striped")
    for right in (other, ring):  # both layouts have been used for this length
        batch = right.shard_batch(IDS)
        nothing(lambda right=right, batch=batch: cross_entropy(Model(right.attention)(batch.input_ids), batch))
    right, wrong = Model(ring.attention), Model(other.attention)
    warns("sharded with layout='zigzag', and every attention", lambda: cross_entropy(wrong(batch.input_ids), batch))
    nothing(lambda: cross_entropy(right(batch.input_ids), batch.labels, ring=ring))
    warns("each token is to predict itself", lambda: cross_entropy(right(batch.input_ids), batch.input_ids, ring=ring))


def check_operands() -> None:
    ring, ids = Ring(layout="striped"), torch.arange(6, dtype=torch.int32).expand(1, -1)
    x = ring.shard(WHOLE[:, :12])
    nothing(lambda: ring.attention(x, x, x, causal=True))
    nothing(lambda: ring.attention(*[x.transpose(1, 2)] * 3, causal=True, qkv_format="bhsd"))
    other = "q was sharded with layout='striped', and this call has layout='contiguous'"
    raises(other, lambda: attend(x))
    raises(other, lambda: attend(x.transpose(1, 2), qkv_format="bhsd"))
    raises("sharded along its dim 1, of 12 in all, and its sequence is taken to be dim 2", lambda: attend(x, qkv_format="bhsd"))
    heads_first = ring.shard(torch.randn(1, 2, 12, 8))
    raises("sharded along its dim 1, of 2 in all", lambda: attend(heads_first, qkv_format="bhsd", layout="striped"))
    nothing(lambda: attend(x, causal=False))  # no layout matters
    nothing(lambda: attend(x, q_position_ids=ids, kv_position_ids=ids))
    warns("shards of this length were taken as striped and attention", lambda: attend(x + dist.get_rank()))
    four_heads = torch.randn(1, 4, 6, 8) + dist.get_rank()
    warns("4 positions and 6 heads; if it is the other way round", lambda: attend(four_heads, layout="striped"))
    raises("one rank's part already, of a whole of 12 along dim 1", lambda: ring.shard(x))
    raises("one rank's part already", lambda: ring.shard_batch(ring.shard(IDS)))
    raises("the shard was sharded with layout='striped'", lambda: unshard(x, layout="zigzag"))
    nothing(lambda: shard(shard(WHOLE[:, :4], dim=2), dim=1))


def check_doubts() -> None:
    ring = Ring(layout="striped")
    warns("every rank of the ring holds the same values", lambda: attend(WHOLE))
    nothing(lambda: attend(torch.ones_like(WHOLE), scale=1.0))
    nothing(lambda: attend(WHOLE + dist.get_rank(), scale=2.0))
    if dist.get_rank():
        ring_attn.positions(16, layout="zigzag")
    different = "in different layouts: ring rank 0: striped; ring rank 1: striped, zigzag"
    warns(different, lambda: ring.attention(*[ring.shard(WHOLE)[..., :4]] * 3))
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtWarning)
        with pytest.raises(DoubtWarning, match="every rank of the ring holds the same values"):
            attend(WHOLE + 1, scale=3.0, layout="zigzag", sliding_window=4)
    nothing(lambda: ring.attention(*[ring.shard(WHOLE[:, :8])] * 3))  # the ring goes on


def check_layers_with_a_state() -> None:
    """As attention's: each operand that has tokens, and the ids; a loss knows of the calls."""
    ring, ones, weight = Ring(layout="zigzag"), torch.ones(2), torch.ones(2, 3)
    x, ids = ring.shard(WHOLE), ring.shard(torch.zeros(1, 16, dtype=torch.int32))
    y, gate = torch.randn(x.shape), torch.rand(x.shape[:3])
    calls = {
        "x": partial(ring_attn.causal_conv1d, x[..., 0], weight),
        "k": partial(ring_attn.linear_attention, y, x, y),
        "g": partial(ring_attn.linear_attention, y, y, y, x),
        "v": partial(ring_attn.gated_delta_rule, y, y, x, gate, gate),
        "beta": partial(ring_attn.kda, y, y, y, y, x[..., 0]),
        "dt": partial(ring_attn.ssd, y, x[..., 0], -ones, y, y, ones),
        "segment_ids": partial(ring_attn.linear_attention, y, y, y, segment_ids=ids),
    }
    for name, call in calls.items():
        raises(f"{name} was sharded with layout='zigzag', and this call has layout='contiguous'", call)
    nothing(lambda: ring_attn.linear_attention(x, x, x, segment_ids=ids, ring=ring))
    nothing(lambda: ring_attn.linear_attention(x.transpose(0, 0), x, x, -ones, ring=ring))
    heads_first = ring.shard(torch.randn(1, 2, 16, 4), dim=2)
    heads = "q [1, 2, 8, 4] was sharded along its dim 2, of 16 in all, and its sequence is taken to be dim 1"
    raises(heads, lambda: ring_attn.linear_attention(*[heads_first] * 3, ring=ring))
    batch = ring.shard_batch(IDS[:, :20])
    values = torch.randn(2, 10, 2, 4) + dist.get_rank()
    weights = torch.zeros(8, 17, requires_grad=True)

    def loss(layout: str) -> Tensor:
        y = ring_attn.linear_attention(values, values, values, layout=layout)
        return cross_entropy(y.flatten(2) @ weights, batch)

    warns("layer with a state since the last loss was called with 'contiguous'", lambda: loss("contiguous"))
    nothing(lambda: loss("zigzag"))


def main() -> None:
    raises("mesh=None needs a process group: torchrun started 2 processes", lambda: attend(WHOLE))
    dist.init_process_group("gloo")
    check_batches(dist.get_rank())
    check_packed_batches(dist.get_rank())
    check_losses()
    check_operands()
    check_doubts()
    check_layers_with_a_state()
    dist.barrier()
    print("mistakes worker: all right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
