"""Run by torchrun with 4 processes: the rings of a 2-D mesh rotate different shapes at the same time."""

import jax
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_bridge.backends.dlpack import to_jax, to_torch
from torch_bridge.mesh import jax_mesh, rings
from torch_bridge.start import runtime

SIZES = {0: (3, 5), 1: (8, 2)}


def rotation(ring: rings.ProcessRing, turns: int):
    """A jitted program that passes every shard on by ``turns`` ranks."""
    pairs = [(source, (source + turns) % ring.size) for source in range(ring.size)]
    spec = jax.sharding.PartitionSpec(rings.AXIS)
    return jax.jit(
        jax.shard_map(
            lambda block: jax.lax.ppermute(block, rings.AXIS, pairs),
            mesh=jax_mesh.jax_mesh(ring),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def run(ring: rings.ProcessRing, local: torch.Tensor) -> torch.Tensor:
    """The shard that arrives from the previous ring rank."""
    runtime.start(ring, device=local.device)
    with runtime.watch(ring, "forward"):
        array = jax_mesh.to_local(rotation(ring, 1)(jax_mesh.to_global(ring, to_jax(local)))).block_until_ready()
    return to_torch(array)


def refused(*where) -> str:
    """The message with which resolve rejects an invalid mesh."""
    try:
        rings.resolve(*where)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{where} was taken")


def check_refusals(rank: int, device_mesh: DeviceMesh) -> None:
    assert "dimensions ['dp', 'cp'] needs mesh_dim" in refused(device_mesh)
    assert "one of the mesh's dimensions ['dp', 'cp'], got 'tp'" in refused(device_mesh, "tp")
    assert "one of the mesh's dimensions ['dp', 'cp'], got 2" in refused(device_mesh, 2)
    assert "mesh_dim chooses a dimension of a DeviceMesh" in refused(dist.group.WORLD, "cp")
    pair = dist.new_group([0, 2])
    half = DeviceMesh("cpu", [1, 2])
    if rank in (0, 2):
        assert rings.resolve(pair) == rings.ProcessRing((0, 2), rank // 2)
    else:
        assert f"global rank {rank}) is not a member" in refused(pair)
    if rank in (1, 2):
        assert rings.resolve(half).ranks == (1, 2)
    else:
        assert f"global rank {rank}) is not in the mesh of ranks [1, 2]" in refused(half)
    assert rings.resolve("local") == rings.ProcessRing((rank,), 0)
    assert rings.resolve(init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp")), "cp") == rings.ProcessRing((rank,), 0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring = rings.resolve(device_mesh, "cp")
    assert ring.ranks == ((0, 1) if rank < 2 else (2, 3)), ring
    assert rings.resolve(device_mesh["cp"]) == ring
    assert dist.get_process_group_ranks(ring.group) == list(ring.ranks)
    check_refusals(rank, device_mesh)
    shape = SIZES[rank // 2]
    for turn in range(20):
        out = run(ring, torch.full(shape, float(10 * turn + rank)))
        assert torch.equal(out, torch.full(shape, float(10 * turn + ring.ranks[1 - ring.rank])))
    dp = rings.resolve(device_mesh, 0)
    assert dp.ranks == (rank % 2, rank % 2 + 2)
    assert run(dp, torch.full((2,), float(rank))).tolist() == [float((rank + 2) % 4)] * 2
    assert run(rings.resolve(), torch.full((2, 3), float(rank))).tolist() == [[float((rank - 1) % 4)] * 3] * 2
    assert (jax.process_index(), jax.process_count(), jax.local_device_count()) == (rank, 4, 1)
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
