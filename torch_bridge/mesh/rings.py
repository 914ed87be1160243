"""Resolves which processes form a ring, with nothing but torch."""

import os
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.mesh.trial import current
from torch_bridge.tracing import constant

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed.device_mesh import DeviceMesh

AXIS = "ring"


class XlaMesh(Protocol):
    """The interface of ``torch_xla.distributed.spmd.Mesh``."""

    mesh_shape: tuple[int, ...]

    def get_logical_mesh(self) -> "np.ndarray": ...


# Variables that launchers set in each process that they start: how many these are.
_LAUNCHED = {"torchrun": "WORLD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE", "srun": "SLURM_STEP_NUM_TASKS"}

MeshLike: TypeAlias = "DeviceMesh | dist.ProcessGroup | XlaMesh | str | None"
MeshDim: TypeAlias = str | int | tuple[str | int, ...] | list[str | int] | None
MeshArg: TypeAlias = tuple[MeshLike, MeshDim]  # as :func:`resolve` takes them


@dataclass(frozen=True)
class ProcessRing:
    """The processes that share one sequence.

    ``ranks``: their global torch ranks in ring order. ``rank``: this process's index in ``ranks``. ``axes``, ``sizes``: the mesh
    axes that the ranks go along, the first one major, and the length of each; a ring over one dimension has the axis "ring".
    ``groups``: torch ProcessGroups whose collectives, one after the other from the last group to the first, reach all ranks in ring
    order; for a ring of one the mesh's group, or (). Compared and hashed by all but the groups: another shape is another program.
    """

    ranks: tuple[int, ...]
    rank: int
    groups: "tuple[dist.ProcessGroup, ...]" = field(default=(), compare=False, repr=False)
    axes: tuple[str, ...] = (AXIS,)
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "sizes", (len(self.ranks),))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """What JAX calls the ring: the axis, or all of several."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """One torch ProcessGroup of all ranks in ring order; None in a job of one process without one. Over several mesh dimensions
        there may be none yet: the first use then makes it, which is a collective of the ring (of the whole job where the default
        group is bound to a device). Raises ValueError for a ring of mesh="local" in a job of several processes."""
        if len(self.groups) > 1:
            return _joint_group(self.ranks, dist.group.WORLD)
        if not self.groups and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f'a ring of mesh="local" has no process group, and torch takes None for all {dist.get_world_size()} processes; '
                "reduce nothing over it, or give a mesh whose dimension has one process"
            )
        return self.groups[0] if self.groups else None

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """The ring ranks whose shards this process holds."""
        return (self.rank,)

    def split(self, tensor: "torch.Tensor", dim: int) -> "torch.Tensor":
        """Returns ``tensor``, a shard, as it is: all of it is on this process's device."""
        return tensor

    def __str__(self) -> str:
        shape = " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"ring of global ranks {list(self.ranks)}" + (f" over {shape}" if len(self.axes) > 1 else "")


def has_ended(ring: object) -> bool:
    """Whether a process group of the ring has been destroyed."""
    try:
        for group in getattr(ring, "groups", ()):
            dist.get_backend(group)
    except (RuntimeError, ValueError):
        return True
    return False


@cache  # by the default group too: a job may destroy its groups and begin anew
def _joint_group(ranks: tuple[int, ...], world: "dist.ProcessGroup") -> "dist.ProcessGroup":
    del world
    ordered: dict[str, Any] = {} if ranks == tuple(sorted(ranks)) else {"sort_ranks": False}
    if not ordered.keys() <= signature(dist.new_group).parameters.keys():
        raise NotImplementedError(
            f"torch {torch.__version__} makes groups of ascending ranks only, got a ring of ranks {list(ranks)}; give mesh_dim in "
            "the order of the mesh, or take a torch whose new_group has sort_ranks (2.13 does)"
        )
    group = dist.new_group(list(ranks), use_local_synchronization=True, **ordered)
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return group


def resolve(mesh: MeshLike = None, mesh_dim: MeshDim = None) -> ProcessRing:
    """The ring that ``mesh`` stands for on this process. Cheap: no communication, no JAX.

    ``mesh``: a DeviceMesh of one dimension, or of several with ``mesh_dim`` (a name, or an index; or several of them, over which
    the ring goes in row-major order, the first one major); a ProcessGroup; "local" (a ring of one: the whole sequence is here);
    None (the default process group, or a ring of one without torch.distributed). Raises ValueError for anything else, for a
    dimension that the mesh does not have or that is given twice, for ``mesh_dim`` without a DeviceMesh, for several dimensions
    along which global ranks do not ascend, and on a process that is not a member.
    """
    ring, trial = _resolve(mesh, mesh_dim), current()
    if trial is None or ring.size == 1 or ring.ranks != trial.alone:
        return ring
    groups = () if trial.group is None else (trial.group,)
    return ProcessRing((ring.ranks[ring.rank],), 0, groups, ring.axes, (1,) * len(ring.axes))


def _resolve(mesh: MeshLike, mesh_dim: MeshDim) -> ProcessRing:
    if _is_device_mesh(mesh):
        return _of_device_mesh(mesh, mesh_dim)
    if mesh_dim is not None:
        raise ValueError(
            f"mesh_dim chooses a dimension of a DeviceMesh, got mesh_dim={mesh_dim!r} with mesh={mesh!r}; leave it out"
        )
    if isinstance(mesh, str) and mesh == "local":
        return _alone()
    if mesh is not None:
        return _of_group(mesh)
    if dist.is_available() and dist.is_initialized():
        return _of_group(dist.group.WORLD)
    _check_started_alone()
    return _alone()


def started_by_a_launcher() -> bool:
    """Whether the environment says that a launcher started several processes."""
    return any(os.environ.get(count, "1") != "1" for count in _LAUNCHED.values())


def _check_started_alone() -> None:
    """Without a process group, each of several processes would attend to its own part alone."""
    for launcher, count in _LAUNCHED.items():
        if int(os.environ.get(count, "1")) > 1:
            raise ValueError(
                f"mesh=None needs a process group: {launcher} started {os.environ[count]} processes ({count}), but "
                "torch.distributed is not initialised in this one. Call torch.distributed.init_process_group first, or pass "
                'mesh="local" if every process has a whole sequence of its own'
            )


def _is_device_mesh(mesh: object) -> "TypeGuard[DeviceMesh]":
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(mesh, DeviceMesh)


def _global_rank() -> int:
    trial = current()
    if trial is not None and trial.rank is not None:
        return trial.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _alone() -> ProcessRing:
    return ProcessRing((_global_rank(),), 0)


def _of_group(group: object) -> ProcessRing:
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this process (global rank {_global_rank()}) is not a member of the group; call only on its members")
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f'mesh must be a DeviceMesh, a ProcessGroup, "local" or None, got {group!r} of type {type(group).__name__}; '
            "torch.distributed.device_mesh.init_device_mesh makes a DeviceMesh; torch-xla's go with tensors on an XLA device"
        )
    rank = dist.get_rank(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    if rank < 0:
        raise ValueError(f"this process (global rank {_global_rank()}) is not in the ring {list(ranks)}; call only on its members")
    return ProcessRing(ranks, rank, (group,))


def _of_device_mesh(mesh: "DeviceMesh", mesh_dim: MeshDim) -> ProcessRing:
    dims = _dim_indices(mesh, mesh_dim)
    if mesh.get_coordinate() is None:
        ranks = mesh.mesh.flatten().tolist()
        raise ValueError(
            f"this process (global rank {_global_rank()}) is not in the mesh of ranks {ranks}; call only on its members"
        )
    return _of_group(mesh.get_group(dims[0])) if len(dims) == 1 else _of_dims(mesh, dims)


def _of_dims(mesh: "DeviceMesh", dims: tuple[int, ...]) -> ProcessRing:
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    ranks = _ranks_along(mesh, dims)
    groups = tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1) or (mesh.get_group(dims[0]),)
    if ranks == tuple(range(dist.get_world_size())):
        groups = (dist.distributed_c10d._get_default_group(),)
    axes, sizes = tuple(names[dim] for dim in dims), tuple(mesh.size(dim) for dim in dims)
    return ProcessRing(ranks, ranks.index(_global_rank()), groups, axes, sizes)


@constant
def _ranks_along(mesh: "DeviceMesh", dims: tuple[int, ...]) -> tuple[int, ...]:
    """The global ranks of the ring through this process, in row-major order of ``dims``."""
    with _disable_current_modes():  # under FakeTensorMode too
        here = mesh.get_coordinate()
        assert here is not None
        others = tuple(slice(None) if dim in dims else place for dim, place in enumerate(here))
        grid = mesh.mesh.numpy()[others].transpose([sorted(dims).index(dim) for dim in dims])
    if any((grid.take(range(1, n), axis) < grid.take(range(n - 1), axis)).any() for axis, n in enumerate(grid.shape)):
        raise ValueError(
            "over several mesh dimensions a ring needs global ranks that ascend along each, as torch orders its groups; got the "
            f"ranks {grid.tolist()}; make the mesh with init_device_mesh, or give a mesh of one dimension"
        )
    return tuple(grid.flatten().tolist())


def _dim_indices(mesh: "DeviceMesh", mesh_dim: MeshDim) -> tuple[int, ...]:
    if not isinstance(mesh_dim, (tuple, list)):
        return (_dim_index(mesh, mesh_dim),)
    dims = tuple(_dim_index(mesh, dim) for dim in mesh_dim if dim is not None)
    if not dims or len({*dims}) < len(mesh_dim):
        raise ValueError(
            f"mesh_dim must be one of the mesh's {_dimensions(mesh)}, or several different ones in the order of the sequence, the "
            f"first one major; got {mesh_dim!r}"
        )
    return dims


def _dimensions(mesh: "DeviceMesh") -> str:
    return f"dimensions {list(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else f"{mesh.ndim} unnamed dimensions"


def _dim_index(mesh: "DeviceMesh", mesh_dim: str | int | None) -> int:
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    if mesh_dim is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"a mesh with {_dimensions(mesh)} needs mesh_dim, the one that the sequence is sharded over, or several of them; "
                "got None"
            )
        return 0
    if mesh_dim in names:
        return names.index(str(mesh_dim))
    if isinstance(mesh_dim, int) and not isinstance(mesh_dim, bool) and 0 <= mesh_dim < mesh.ndim:
        return mesh_dim
    raise ValueError(f"mesh_dim must be one of the mesh's {_dimensions(mesh)}, got {mesh_dim!r}")
