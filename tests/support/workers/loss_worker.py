"""One rank of the tests of the loss and of the sum of gradients. Run by test_loss.py under torch.distributed.run, on two ranks.

Sequences have few different lengths: each is a program to compile."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ring_attn import Ring, RingAttention, chunked_cross_entropy, cross_entropy, shard_batch, start, sync_gradients, total_loss
from tests.support.healthy import gloo_world

VOCABULARY, WIDTH = 17, 8


class Model(nn.Module):
    """An attention between an embedding and a head, and one parameter that takes no part."""

    def __init__(self, ring):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = RingAttention(WIDTH, 2, batch_first=True, causal=True, ring=ring)
        self.unused = nn.Parameter(torch.ones(3))

    def hidden(self, batch):
        x = self.embedding(batch.input_ids)
        return x + self.attention(x, x, x)[0]

    def forward(self, batch):
        return self.head(self.hidden(batch))


def model(ring):
    torch.manual_seed(0)
    return Model(ring).double()


def tokens(length):
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


def expected(batch, **options):
    """Loss and gradients of one process."""
    whole = model(Ring("local"))
    loss = nn.functional.cross_entropy(whole(batch).flatten(0, 1), batch.labels.flatten(), **options)
    loss.backward()
    return loss, whole


def assert_equal(ours, whole, loss, ours_total):
    torch.testing.assert_close(ours_total, loss.detach(), rtol=1e-12, atol=1e-12)
    for (name, own), (_, other) in zip(ours.named_parameters(), whole.named_parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)


def check_a_step_is_that_of_one_process():
    for layout, length, labelled in (("zigzag", 9, 9), ("contiguous", 12, 5)):
        ring, ids = Ring(layout=layout), tokens(length)
        labels = ids.clone()
        labels[:, labelled:] = -100  # on contiguous shards the second rank then has none
        batch = ring.shard_batch(ids, labels)
        for smoothing in (0.0, 0.1):
            loss, whole = expected(shard_batch(ids, labels, mesh="local"), label_smoothing=smoothing)
            ours = model(ring)
            share = cross_entropy(ours(batch), batch, label_smoothing=smoothing)
            share.backward()
            sync_gradients(ours, ring=ring)
            assert_equal(ours, whole, loss, total_loss(share, ring=ring))
        counted = cross_entropy(ours(batch), batch.labels, ring=ring, label_smoothing=0.1)
        assert torch.equal(counted, share)


def check_a_loss_in_chunks_is_that_of_one_process():
    ring, ids = Ring(layout="zigzag"), tokens(12)
    loss, whole = expected(shard_batch(ids, mesh="local"))
    batch = ring.shard_batch(ids)
    for labels in (batch, batch.labels):
        ours = model(ring)
        share = chunked_cross_entropy(ours.head, ours.hidden(batch), labels, chunk_size=5, ring=ring)
        share.backward()
        sync_gradients(ours, ring=ring)
        assert_equal(ours, whole, loss, total_loss(share, ring=ring))


def check_weights_and_num_items():
    ring, ids = Ring(layout="zigzag"), tokens(12)
    weights = torch.rand(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 20  # they add up to less than 1
    batch, whole_batch = ring.shard_batch(ids), shard_batch(ids, mesh="local")
    losses = cross_entropy(model(Ring("local"))(whole_batch), whole_batch, reduction="none")
    logits = model(ring)(batch)
    mean = total_loss(cross_entropy(logits, batch, weights=ring.shard(weights)))
    torch.testing.assert_close(mean, (losses * weights).sum() / weights[:, :-1].sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(total_loss(cross_entropy(logits, batch, reduction="sum")), losses.sum(), rtol=1e-12, atol=0)
    for items in (7, torch.tensor(7)):
        torch.testing.assert_close(total_loss(cross_entropy(logits, batch, num_items=items)), losses.sum() / 7, rtol=1e-12, atol=0)


def check_no_label_at_all():
    ids = tokens(12)
    batch = shard_batch(ids, torch.full_like(ids, -100), layout="zigzag")
    for labels in (batch, batch.labels):
        ours = model(Ring(layout="zigzag"))
        share = cross_entropy(ours(batch), labels)
        share.backward()
        sync_gradients(ours.parameters())
        assert share.item() == 0
        assert all(not x.grad.any() for x in ours.parameters() if x is not ours.unused)


def check_accumulation_is_summed_once():
    ring, parts = Ring(layout="zigzag"), [tokens(9), tokens(12)]
    ours, whole = model(ring), model(Ring("local"))
    whole_batches, batches = [shard_batch(ids, mesh="local") for ids in parts], [ring.shard_batch(ids) for ids in parts]
    items = sum(batch.num_labels for batch in batches)
    shares = [cross_entropy(ours(batch), batch, num_items=items) for batch in batches]
    for share in shares:
        share.backward()
    sync_gradients(ours, ring=ring)
    sums = [cross_entropy(whole(batch), batch, reduction="sum") for batch in whole_batches]
    loss = sum(sums) / items
    loss.backward()
    assert_equal(ours, whole, loss, total_loss(sum(shares)))


def check_gradients_of_some_ranks(rank):
    """Half precision sums once, a strided gradient is filled right, and what only one rank has reaches both."""
    mine, half, strided, frozen, nobodys = (nn.Parameter(torch.zeros(4)) for _ in range(5))
    half.data, strided.data = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, 3)
    if rank == 1:
        mine.grad = torch.full((4,), 5.0)
    half.grad = torch.tensor([1.0, 2.0**-9 if rank else 1.0], dtype=torch.bfloat16)
    strided.grad = torch.arange(6.0).view(3, 2).T
    frozen.grad = torch.ones(4)
    frozen.requires_grad_(False)
    sync_gradients([mine, half, strided, frozen, nobodys, mine])
    assert mine.grad.tolist() == [5.0] * 4 and nobodys.grad is None and frozen.grad.tolist() == [1.0] * 4
    assert torch.equal(strided.grad, 2 * torch.arange(6.0).view(3, 2).T)
    assert torch.equal(half.grad, torch.tensor([2.0, 1 + 2.0**-9]).to(torch.bfloat16))


def check_large_halves_are_summed_in_float32(rank):
    """Each rank sums a part of them: the same bits on all ranks, rounded once. The length divides by nothing."""
    for dtype in (torch.bfloat16, torch.float16):
        given = [torch.randn(3, 2**15 + 1, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(2)]
        parameter = nn.Parameter(torch.zeros(2**15 + 1, 3, dtype=dtype).t())
        parameter.grad = torch.empty_like(parameter).copy_(given[rank])
        sync_gradients([parameter])
        assert torch.equal(parameter.grad, torch.stack(given).double().sum(0).float().to(dtype))


def check_disagreement_raises_on_both(rank):
    odd = nn.Parameter(torch.zeros(2 + rank))
    with pytest.raises(ValueError, match="same parameters in the same order"):
        sync_gradients([odd])
    alone = nn.Parameter(torch.zeros(2))
    if rank == 0:
        alone.grad = torch.zeros(2).to_sparse()
    with pytest.raises(ValueError, match="sums dense gradients"):
        sync_gradients([alone])
    logits, labels = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="labels' shape"):
        cross_entropy(logits, labels[:, rank:] if rank else labels)
    with pytest.raises(ValueError, match="every rank of it must make the same call"):
        cross_entropy(logits, labels, weights=torch.ones(1, 4) if rank else None)
    with pytest.raises(ValueError, match="each must make the same call"):
        total_loss(torch.zeros((), dtype=torch.float64 if rank else torch.float32))


def check_sums_are_not_summed_again():
    """Untouched, or with backwards added to them; not where anything else became of them, or of those of one rank."""
    ring, ids = Ring(layout="zigzag"), tokens(9)
    batch, again = ring.shard_batch(ids), pytest.raises(ValueError, match="are sums over the ring already")
    ours = model(ring)

    def backward():
        cross_entropy(ours(batch), batch).backward()

    backward()
    sync_gradients(ours, ring=ring)
    for _ in range(2):
        with again:
            sync_gradients(ours, ring=ring)
    backward()
    backward()
    with pytest.raises(ValueError, match="a backward has added to sums over the ring"):
        sync_gradients(ours, ring=ring)
    for change in (ours.zero_grad, lambda: ours.zero_grad(set_to_none=False), lambda: ours.embedding.weight.grad.mul_(2)):
        change()
        backward()
        sync_gradients(ours, ring=ring)
    for parameter in ours.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()  # bumps no version
    sync_gradients(ours, ring=ring)


def check_what_has_been_reduced_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    parallel = DistributedDataParallel(nn.Linear(4, 4))
    for reduced, name in ((sharded, "FSDP"), (parallel, "DistributedDataParallel"), (sharded.parameters(), "FSDP")):
        with pytest.raises(ValueError, match=f"{name} takes its mean over ranks of the ring already"):
            sync_gradients(reduced, mesh)


def check_a_mean_over_the_ring_needs_a_factor():
    """Where DistributedDataParallel or FSDP reduces over the ring, as docs/own-model.md says."""
    ring, ids = Ring(layout="zigzag"), tokens(9)
    batch = ring.shard_batch(ids)
    _, whole = expected(shard_batch(ids, mesh="local"))
    for wrap in (lambda x: DistributedDataParallel(x, find_unused_parameters=True), fully_shard):
        ours = wrap(model(ring))
        share = cross_entropy(ours(batch), batch)
        (share * 2).backward()
        for own, other in zip(ours.parameters(), whole.parameters(), strict=True):
            if other.grad is not None:
                gradient = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
                torch.testing.assert_close(gradient, other.grad, rtol=1e-12, atol=1e-12)


def check_dtensors_beside_the_ring(rank):
    """Their mesh is this process alone, as that of FSDP over a dimension beside the ring's."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "dp"))
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["dp"], [Replicate()]))
    layer.weight.grad = distribute_tensor(torch.full((2, 3), 1.0 + rank), mesh["dp"], [Replicate()])
    if rank:
        layer.bias.grad = torch.ones(2)
    sync_gradients(layer, mesh, mesh_dim="cp")
    assert layer.weight.grad.to_local().eq(3).all()
    assert layer.bias.grad.eq(1).all()


def check_under_compile():
    ring, ids = Ring(layout="zigzag"), tokens(8)
    batch = ring.shard_batch(ids)
    logits = torch.randn(*batch.labels.shape, VOCABULARY)
    for labels in (batch, batch.labels):
        compiled = torch.compile(lambda x, y: cross_entropy(x, y, ring=ring), backend="eager", fullgraph=labels is batch)
        torch.testing.assert_close(compiled(logits, labels), cross_entropy(logits, labels, ring=ring))


def main():
    with gloo_world("loss") as (rank, _):
        start()  # before the first call without a ring
        check_a_step_is_that_of_one_process()
        check_a_loss_in_chunks_is_that_of_one_process()
        check_weights_and_num_items()
        check_no_label_at_all()
        check_accumulation_is_summed_once()
        check_gradients_of_some_ranks(rank)
        check_large_halves_are_summed_in_float32(rank)
        check_disagreement_raises_on_both(rank)
        check_sums_are_not_summed_again()
        check_what_has_been_reduced_is_refused()
        check_a_mean_over_the_ring_needs_a_factor()
        check_dtensors_beside_the_ring(rank)
        check_under_compile()


if __name__ == "__main__":
    main()
