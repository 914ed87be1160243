"""One rank of the sequence tests. Run by test_sequence.py under torch.distributed.run, on any even number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from jax_core.masks.layout import LAYOUTS, shard_indices
from ring_attn import ring_attention
from ring_attn.sharding.sequence import pad, positions, shard, shard_batch, unshard
from tests.support.healthy import gloo_world


def random(*shape, seed, dtype=torch.float64):
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_round_trip(rank, size):
    for layout in LAYOUTS:
        for dim, length in ((1, 8 * size), (-1, 2 * size)):
            shape = [3, 4, 5]
            shape[dim] = length
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool):
                whole = (random(*shape, seed=1) * 3).to(dtype)
                own = shard(whole, dim=dim, layout=layout)
                assert own.shape[dim] == length // size
                back = unshard(own, dim=dim, layout=layout)
                assert back.dtype == dtype
                assert torch.equal(back, whole), (layout, dim, dtype)
        uneven = random(2, 4 * size - 3, 3, seed=2)
        own = shard(pad(uneven, layout=layout, value=9.0), layout=layout)
        assert torch.equal(unshard(own, layout=layout, length=uneven.shape[1]), uneven)


def check_gradients(rank, size):
    """The objective is the sum of all ranks' losses; every rank computes that sum here, in one process, and differentiates it."""
    for layout in LAYOUTS:
        length = 4 * size
        whole = random(2, length, 3, seed=3).requires_grad_()
        weights = [random(2, length - 1, 3, seed=10 + other) for other in range(size)]
        own = shard(whole.detach(), layout=layout).requires_grad_()
        (unshard(own, layout=layout, length=length - 1).sin() * weights[rank]).sum().backward()
        sum((whole[:, :-1].sin() * weight).sum() for weight in weights).backward()
        expected = whole.grad[:, shard_indices(layout, rank, size, length)]
        torch.testing.assert_close(own.grad, expected, rtol=1e-12, atol=1e-12)
        # Through both: unshard(shard(x)) is the identity on each rank, so the gradients of the ranks add up to size * cos.
        leaf = whole.detach().requires_grad_()
        unshard(shard(leaf, layout=layout), layout=layout).sin().sum().backward()
        total = leaf.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, size * whole.detach().cos(), rtol=1e-12, atol=1e-12)


def check_second_derivatives(rank, size):
    """Of the sum of all ranks' losses, each with a penalty on the gradients of its own shard."""
    for layout in LAYOUTS:
        own = shard(random(2, 4 * size, 3, seed=4), layout=layout).requires_grad_()
        (gradient,) = torch.autograd.grad(unshard(own, layout=layout).pow(3).sum(), own, create_graph=True)
        torch.testing.assert_close(gradient, 3 * size * own**2)
        (found,) = torch.autograd.grad(gradient.square().sum(), own)
        torch.testing.assert_close(found, 36 * size**2 * own.detach() ** 3, rtol=1e-12, atol=1e-12)


def check_the_incoming_gradient_is_left_alone(rank, size):
    own, upstream = torch.zeros(2, 4, requires_grad=True), torch.full((2, 4 * size), 1.0 + rank)
    unshard(own).backward(upstream)
    assert bool((upstream == 1.0 + rank).all())
    assert bool((own.grad == sum(range(1, size + 1))).all())


def check_half_precision_sums_once(rank, size):
    own = torch.zeros(1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = 1.0 if rank == 0 else 2.0**-8  # in bfloat16 each of these is lost when added to 1, but not their sum
    (unshard(own).float() * weight).sum().backward()
    expected = torch.tensor(1 + (size - 1) * 2.0**-8).to(torch.bfloat16)
    assert bool((own.grad == expected).all()), (own.grad, expected)


def check_batch(rank, size):
    ids = random(2, 6 * size + 1, seed=4).mul(50).long()
    for layout in LAYOUTS:
        batch = shard_batch(ids, layout=layout)
        assert torch.equal(unshard(batch.input_ids, layout=layout, length=batch.length), ids)
        labels = unshard(batch.labels, layout=layout)
        assert torch.equal(labels[:, : batch.length - 1], ids[:, 1:])
        assert bool((labels[:, batch.length - 1 :] == -100).all())
        counted = positions(batch.length, layout=layout).clamp_max(batch.length - 1)  # those of padding too
        assert torch.equal(batch.position_ids[0], counted)
        segments = unshard(batch.segment_ids, layout=layout)
        assert bool((segments[:, : batch.length] == 0).all())
        assert bool((segments[:, batch.length :] == -1).all())


def check_documents_in_another_layout(rank, size):
    """Segment ids belong to their rows: without a mask that goes by places, the call's layout decides nothing."""
    documents = (torch.arange(8 * size) // 5)[None]
    q = random(1, 8 * size, 2, 8, seed=7, dtype=torch.float32)
    same = (documents[:, :, None] == documents[:, None])[:, None]
    whole = F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, attn_mask=same).transpose(1, 2)
    batch, own = shard_batch(documents, segment_ids=documents, layout="zigzag"), shard(q, layout="zigzag").clone()
    for layout in LAYOUTS:
        out = ring_attention(own, own, own, layout=layout, q_segment_ids=batch.segment_ids)
        torch.testing.assert_close(unshard(out, layout="zigzag"), whole)


def check_rings_of_a_mesh(rank, size):
    """Two rings at once, with different shapes."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    replica = rank // (size // 2)
    whole = random(1 + replica, (3 + replica) * size, seed=5 + replica)
    for chosen in ({"mesh": mesh, "mesh_dim": "cp"}, {"mesh": mesh["cp"]}, {"mesh": mesh.get_group("cp")}):
        own = shard(whole, layout="zigzag", **chosen)
        assert own.shape[1] == whole.shape[1] // (size // 2)
        assert torch.equal(unshard(own, layout="zigzag", **chosen), whole)


def check_disagreement_raises_everywhere(rank, size):
    odd = rank == size - 1
    different = [
        (torch.zeros(1, 3 if odd else 4, 2), {}),
        (torch.zeros(1, 4, 2, dtype=torch.float64 if odd else torch.float32), {}),
        (torch.zeros(1, 4) if odd else torch.zeros(1, 4, 2), {}),
        (torch.zeros(1, 4, 2), {"layout": "zigzag" if odd else "striped"}),
        (torch.zeros(1, 4, 2), {"length": 3 if odd else None}),
        (torch.zeros(1, 4, 2, requires_grad=odd), {}),
        (torch.zeros(1, 3 if odd else 4, 2), {"layout": "zigzag"}),
    ]
    for tensor, options in different:
        with pytest.raises(ValueError, match="on every rank of the ring") as raised:
            unshard(tensor, **options)
        assert str(list(tensor.shape)) in str(raised.value), raised.value


def main():
    with gloo_world("sequence") as (rank, size):
        check_round_trip(rank, size)
        check_gradients(rank, size)
        check_second_derivatives(rank, size)
        check_the_incoming_gradient_is_left_alone(rank, size)
        check_half_precision_sums_once(rank, size)
        check_batch(rank, size)
        check_documents_in_another_layout(rank, size)
        check_rings_of_a_mesh(rank, size)
        check_disagreement_raises_everywhere(rank, size)


if __name__ == "__main__":
    main()
