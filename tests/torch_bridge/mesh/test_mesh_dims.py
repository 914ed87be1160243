"""Rings over several dimensions of a mesh: who is in them, in which order, without any communication."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_attn import Ring, ring_attention
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.torch_tpu import tile_world
from torch_bridge.mesh import rings
from torch_bridge.mesh.protocol import tensors_per_sequence
from torch_bridge.mesh.rings import resolve

RANK = 6


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The second rank of both inner dimensions' first pair, in the second replica."""
    dist.init_process_group("fake", rank=RANK, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ulysses", "ring"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dims", "ranks"),
    [
        (("ulysses", "ring"), (4, 5, 6, 7)),
        (("ring", "ulysses"), (4, 6, 5, 7)),
        (["dp", "ring"], (2, 3, 6, 7)),
        ((2, 0), (2, 6, 3, 7)),
        (("ring", "dp", "ulysses"), (0, 2, 4, 6, 1, 3, 5, 7)),
    ],
)
def test_ranks_are_in_row_major_order_of_the_dimensions(mesh, dims, ranks):
    ring = resolve(mesh, dims)
    names = tuple(mesh.mesh_dim_names[dim] if isinstance(dim, int) else dim for dim in dims)
    assert (ring.ranks, ring.ranks[ring.rank], ring.axes, ring.sizes) == (ranks, RANK, names, (2,) * len(dims))
    assert ring.axis_name == names and str(ring) == f"ring of global ranks {list(ranks)} over " + " x ".join(
        f"{x}=2" for x in names
    )


def test_a_ring_over_one_dimension_is_what_it_was(mesh):
    assert resolve(mesh, ("ring",)) == resolve(mesh, "ring") == rings.ProcessRing((6, 7), 0)
    assert resolve(mesh, ("ring",)).axis_name == rings.AXIS and resolve(mesh, "ring").sizes == (2,)


def test_rings_of_other_shapes_are_others(mesh):
    square = resolve(mesh, ("ulysses", "ring"))
    assert square == resolve(mesh["ulysses", "ring"], (0, 1)) and hash(square) == hash(resolve(mesh, (1, 2)))
    assert square != rings.ProcessRing(square.ranks, square.rank) and square != resolve(mesh, ("ring", "ulysses"))


def test_meshes_without_names_and_dimensions_of_one(mesh):
    ring = resolve(DeviceMesh("cpu", torch.arange(8).view(4, 1, 2)), (0, 1, 2))
    assert (ring.axes, ring.sizes, ring.rank) == (("dim0", "dim1", "dim2"), (4, 1, 2), RANK)
    alone = resolve(DeviceMesh("cpu", torch.arange(8).view(8, 1, 1)), (1, 2))
    assert (alone.ranks, alone.sizes) == ((RANK,), (1, 1))


def test_no_ring_of_one_has_a_group_that_torch_takes_for_the_world(mesh):
    """torch takes None for all processes: a sum over a ring of one would be one over the replicas."""
    replicas = DeviceMesh("cpu", torch.arange(8).view(8, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    for dims in ("cp", ("cp", "tp")):
        ring = Ring(replicas, mesh_dim=dims)
        assert ring.size == 1 and dist.get_process_group_ranks(ring.group) == [RANK]
    with pytest.raises(ValueError, match=r'mesh="local" has no process group, and torch takes None for all 8 processes'):
        _ = Ring("local").group


@pytest.mark.parametrize("dims", [(), [], ("ring", "ring"), ("ring", 2), ("ring", None), ("dp", "ulysses", "ring", "dp")])
def test_dimensions_that_are_none_or_given_twice_are_refused(mesh, dims):
    with pytest.raises(ValueError, match=r"\['dp', 'ulysses', 'ring'\], or several different ones .* first one major"):
        resolve(mesh, dims)


@pytest.mark.parametrize("dims", [("ring", "tp"), ("ring", True), ("ring", 3)])
def test_unknown_dimensions_are_refused(mesh, dims):
    with pytest.raises(ValueError, match=r"one of the mesh's dimensions \['dp', 'ulysses', 'ring'\], got (True|3|'tp')"):
        resolve(mesh, dims)


def test_ranks_that_do_not_ascend_are_refused(mesh):
    with pytest.raises(ValueError, match=r"ascend along each, .* got the ranks \[\[7, 6\], \[5, 4\]\]"):
        resolve(DeviceMesh("cpu", [[7, 6], [5, 4]]), (0, 1))


def test_several_dimensions_need_a_device_mesh(mesh):
    with pytest.raises(ValueError, match="mesh_dim chooses a dimension of a DeviceMesh"):
        resolve(None, ("ulysses", "ring"))


def test_tracers_and_fake_tensors_see_the_ring(mesh):
    def parts(x):
        return x * tensors_per_sequence(backend_of(x.device).resolve(mesh, ("ring", "ulysses")))

    assert torch.compile(parts, backend="eager", fullgraph=True)(torch.ones(1)).item() == 4
    with FakeTensorMode():
        assert resolve(mesh, ("ring", "ulysses")).ranks == (4, 6, 5, 7)


def test_a_ring_with_a_list_of_dimensions_is_hashable(mesh):
    ring = Ring(mesh, mesh_dim=["ulysses", "ring"])
    assert ring == Ring(mesh, mesh_dim=("ulysses", "ring")) and len({ring, Ring(mesh, mesh_dim=("ulysses", "ring"))}) == 1
    assert (ring.size, ring.rank) == (4, 2)


def test_a_strategy_of_two_dimensions_runs_on_one_rank(mesh):
    place = dict(mesh=DeviceMesh("cpu", torch.arange(8).view(8, 1, 1)), mesh_dim=(1, 2))
    x = torch.randn(1, 8, 2, 4, requires_grad=True)
    results = [
        ring_attention(x, x, x, causal=True, **options) for options in (dict(mesh="local"), place | {"strategy": "ulysses_ring"})
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x) for out in results))
    with pytest.raises(NotImplementedError, match="it needs two mesh axes"):
        ring_attention(x, x, x, mesh="local", strategy="ulysses_ring")


def test_torch_tpu_refuses_several_dimensions(mesh):
    with pytest.raises(NotImplementedError, match=r"one mesh dimension for the sequence; got a ring .* over ulysses=2"):
        tile_world(resolve(mesh, ("ulysses", "ring")))
