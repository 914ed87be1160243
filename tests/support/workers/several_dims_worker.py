"""Run by torchrun with 4 processes: one sequence over two dimensions of a mesh, in both orders.

Prints "ok <what>" on rank 0 for each check that all ranks have passed.
"""

from inspect import signature

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ring_attn
from ring_attn import Ring
from torch_bridge.mesh import rings
from torch_bridge.start.runtime import start

BOTH, TURNED = ("a", "b"), ("b", "a")
ANY_ORDER = "sort_ranks" in signature(dist.new_group).parameters  # of a group's ranks: from torch 2.13 on


def check_groups(mesh: DeviceMesh, rank: int) -> None:
    """A ring has a group of its own ranks, which sees the collectives of these alone."""
    if not ANY_ORDER:
        with pytest.raises(NotImplementedError, match=r"ascending ranks only, got a ring of ranks \[0, 2, 1, 3\]"):
            _ = rings.resolve(mesh, TURNED).group
    for dims in (BOTH, TURNED) if ANY_ORDER else (BOTH,):
        ring = rings.resolve(mesh, dims)
        assert dist.get_process_group_ranks(ring.group) == list(ring.ranks) and dist.get_rank(ring.group) == ring.rank
        assert ring.group is rings.resolve(mesh, dims).group
        gathered = [torch.empty(1) for _ in range(4)]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=ring.group)
        assert tuple(map(int, gathered)) == ring.ranks


def check_sequence(mesh: DeviceMesh, rank: int) -> None:
    """Shards in the ring's order whatever the order of its dimensions, and their way back, with gradients."""
    whole = torch.randn(2, 24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dims in (BOTH, TURNED):
        ring = Ring(mesh, mesh_dim=dims, layout="zigzag")
        own = ring.shard(whole).requires_grad_()
        back = ring.unshard(own)
        assert torch.equal(back, whole), dims
        (back * (ring.rank + 1)).sum().backward()
        assert bool((own.grad == 10).all())
        batch = ring.shard_batch(whole[..., 0].mul(9).long())
        assert torch.equal(ring.unshard(batch.input_ids), whole[..., 0].mul(9).long())
        assert torch.equal(ring.unshard(ring.positions(whole.shape[1])[None]), torch.arange(whole.shape[1])[None])
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), float(rank))
    ring_attn.sync_gradients([parameter], ring=Ring(mesh, mesh_dim=TURNED))
    assert parameter.grad.tolist() == [6.0] * 3
    assert ring_attn.total_loss(torch.tensor(float(rank)), mesh, mesh_dim=BOTH) == 6


def check_shapes_of_one_ring(mesh: DeviceMesh, rank: int) -> None:
    """Rings of the same ranks and different shapes in one job: each goes on after the other, and ranks that disagree are told."""
    flat = rings.resolve(mesh, BOTH).group
    places = [dict(mesh=mesh, mesh_dim=BOTH), dict(mesh=flat), dict(mesh=mesh, mesh_dim=TURNED)]
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = ring_attn.ring_attention(x, x, x, mesh="local", causal=True)
    for place in (*places, *places, *places[::-1]):
        own = ring_attn.shard(x, **place)
        out = ring_attn.ring_attention(own, own, own, causal=True, **place)
        torch.testing.assert_close(out, ring_attn.shard(exact, **place), rtol=1e-11, atol=1e-11)
    own = x[:, 8 * rank :][:, :8]
    for causal, differs in ((True, "causal window"), (False, "new program")):
        # The first program is known on all ranks in both shapes; a window makes it a new one, which is compared.
        window = dict(sliding_window=5) if causal else {}
        with pytest.raises(ValueError, match=r"over a=2 x b=2") as told:
            ring_attn.ring_attention(own, own, own, causal=causal, **window, **places[rank % 2])
        assert "ring rank 1: " in str(told.value), (differs, told.value)
    out = ring_attn.ring_attention(own, own, own, causal=True, **places[0])
    torch.testing.assert_close(out, exact[:, 8 * rank :][:, :8], rtol=1e-11, atol=1e-11)


def check_module(mesh: DeviceMesh, rank: int) -> None:
    torch.manual_seed(0)
    place = dict(mesh=mesh, mesh_dim=list(BOTH), layout="striped")
    sizes = dict(embed_dim=16, num_heads=4, num_kv_heads=2, batch_first=True, causal=True, sinks=True, dtype=torch.float64)
    module = ring_attn.RingAttention(**sizes, **place, strategy="ring")
    alone = ring_attn.RingAttention(**sizes, mesh="local")
    alone.load_state_dict(module.state_dict())
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    padding = torch.zeros(2, 16, dtype=torch.float64).index_fill_(1, torch.tensor([13, 14, 15]), -torch.inf)
    own = ring_attn.shard(x, **place)
    out, _ = module(own, own, own, key_padding_mask=ring_attn.shard(padding, dim=1, **place))
    exact, _ = alone(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(out, ring_attn.shard(exact, **place))


def main() -> None:
    dist.init_process_group("gloo")
    start()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=BOTH)
    for check in (check_groups, check_sequence, check_shapes_of_one_ring, check_module):
        check(mesh, rank)
        if rank == 0:
            print("ok", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
