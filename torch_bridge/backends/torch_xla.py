"""The torch-xla backend: for tensors on an XLA device in SPMD mode, the ring becomes part of torch-xla's graph.
Experimental: run on CPU devices and lowered for TPUs, never run on one.

One process sees whole tensors and XLA splits them over the devices of a ``torch_xla.distributed.spmd.Mesh``, so no data crosses
from torch to JAX here: JAX only traces the forward and backward (an operation's ``whole``), and their HLO goes into torch-xla's
graph, as with ``torch_xla.core.xla_builder.call_jax``. But ``call_jax`` lowers for the devices that JAX sees, and JAX must not open
a TPU that torch-xla holds. Here both are lowered for torch-xla's hardware, over a mesh without devices.

This module loads torch-xla and JAX; it is imported only for tensors of device type "xla".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import torch
import torch.distributed as dist
import torch_xla.core.xla_builder as xla_builder
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from jax.sharding import AbstractMesh

from jax_core.experimental import warn_experimental
from torch_bridge.backends.operation import GlobalProgram, Request, Results
from torch_bridge.mesh.protocol import AnyRing, Tensors
from torch_bridge.mesh.rings import MeshDim, MeshLike

OPERATORS = None
_HARDWARE = ("CPU", "TPU")
_WIDE = (torch.float64, torch.int64)


@dataclass(frozen=True)
class DeviceRing:
    """``size`` devices along dimension ``dim`` of ``mesh``; without a mesh there is no ring. ``ranks_here``: all ranks."""

    mesh: AbstractMesh | None = None
    dim: int = 0
    size: int = 1
    devices: spmd.Mesh | None = field(default=None, compare=False, repr=False)

    @property
    def ranks_here(self) -> Sequence[int]:
        return range(self.size)

    @property
    def group(self) -> None:
        """There is one process."""

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """``tensor``, not sharded so far, with its dimension ``dim`` split over the ring."""
        if self.size > 1:
            spmd.mark_sharding(tensor, self.devices, tuple(self.dim if i == dim else None for i in range(tensor.ndim)))
        return tensor


def resolve(mesh: MeshLike = None, mesh_dim: MeshDim = None) -> DeviceRing:
    """The ring that ``mesh`` stands for, for tensors on an XLA device.

    ``mesh``: a ``torch_xla.distributed.spmd.Mesh`` of one dimension, or of several with ``mesh_dim`` (a name, or an index); None
    (the mesh of ``torch_xla.distributed.spmd.set_global_mesh``, or no ring if none was set); "local" (no ring). The other
    dimensions of the mesh split the batch if they divide it. Raises ValueError for anything else, for a dimension that the mesh
    does not have, and for a mesh of several devices outside SPMD mode.
    """
    mesh = _global_mesh() if mesh is None else mesh
    if mesh is None or (isinstance(mesh, str) and mesh == "local"):
        if mesh_dim is not None:
            raise ValueError(f"mesh_dim chooses a dimension of a mesh, got mesh_dim={mesh_dim!r} and no mesh; give both or neither")
        return DeviceRing()
    if not isinstance(mesh, spmd.Mesh):
        raise ValueError(
            'with tensors on an XLA device mesh must be a torch_xla.distributed.spmd.Mesh, "local" or None, got '
            f"{mesh!r} of type {type(mesh).__name__}; torch_xla.distributed.spmd.get_1d_mesh(name) makes one of all devices"
        )
    if mesh.size() > 1 and not xla_runtime.is_spmd():
        raise ValueError(
            f"a mesh of {mesh.size()} XLA devices needs torch-xla's SPMD mode, which is off; call torch_xla.runtime.use_spmd() "
            "before the first tensor is made"
        )
    return _of_mesh(mesh, _one_dim(mesh_dim))


def _one_dim(mesh_dim: MeshDim) -> str | int | None:
    if not isinstance(mesh_dim, (tuple, list)):
        return mesh_dim
    if len(mesh_dim) != 1:
        raise NotImplementedError(
            f"torch-xla's graphs have one mesh dimension for the sequence; got mesh_dim={mesh_dim!r}; give one, and make the mesh "
            "with one dimension for the devices of these"
        )
    return mesh_dim[0]


def _global_mesh() -> spmd.Mesh | None:
    mesh = spmd.get_global_mesh()
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if mesh is None and several and not xla_runtime.is_spmd():
        raise ValueError(
            "with tensors on an XLA device a ring is a mesh of devices in SPMD mode, not a group of processes; got mesh=None among "
            f'{dist.get_world_size()} processes without SPMD. Call torch_xla.runtime.use_spmd() and give a mesh, or mesh="local"'
        )
    return mesh


@cache  # a mesh is made once, and every call needs its ring
def _of_mesh(mesh: spmd.Mesh, mesh_dim: str | int | None) -> DeviceRing:
    names = tuple(map(str, mesh.shape()))
    if mesh_dim is None and len(names) > 1:
        raise ValueError(f"a mesh with dimensions {list(names)} needs mesh_dim, the one of the sequence; got None")
    index = 0 if mesh_dim is None else mesh_dim
    if isinstance(index, str) and index in names:
        index = names.index(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(names):
        raise ValueError(f"mesh_dim must be one of the mesh's dimensions {list(names)} or an index of them, got {mesh_dim!r}")
    sizes = tuple(map(int, mesh.mesh_shape))
    return DeviceRing(AbstractMesh(sizes, names), index, sizes[index], mesh)


def tracing(ring: AnyRing, query: torch.Tensor) -> AbstractContextManager[None]:
    del ring, query
    return _jax_for_torch_xla()


def check(query: torch.Tensor) -> None:
    del query
    _platform()


@dataclass(frozen=True, eq=False)
class GraphProgram:
    """One request as part of torch-xla's graph."""

    whole: GlobalProgram
    platform: str
    operators: None = None

    def forward(self, operands: Tensors) -> Results:
        return tuple(call(self.whole.forward, _present(operands), self.platform))

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        function = self.whole.backward(tuple(wanted), tuple(x is not None for x in cotangents))
        return call(function, _present((*results, *cotangents, *operands)), self.platform)


def _present(tensors: Tensors) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def program(request: Request) -> GraphProgram:
    ring, platform = request.ring, _platform()
    if platform == "tpu":
        warn_experimental('device "xla" (torch-xla)', "run on CPU devices and lowered for TPUs, never run on one")
    assert isinstance(ring, DeviceRing)
    with _jax_for_torch_xla():
        forward, backward = request.operation.whole(request, ring.mesh, ring.dim, platform)
    return GraphProgram(GlobalProgram(forward, cache(backward)), platform)  # a function is traced anew for each new object


def _platform() -> str:
    """JAX's name for torch-xla's hardware."""
    hardware = xla_runtime.device_type()
    if hardware not in _HARDWARE:
        raise NotImplementedError(
            f"the torch-xla backend runs on {' and '.join(_HARDWARE)}, got {hardware}; use torch's own device"
        )
    return hardware.lower()


def call(function: Callable[..., object], tensors: Sequence[torch.Tensor], platform: str) -> list[torch.Tensor]:
    """Adds ``function`` of JAX arrays to the graph of ``tensors``, which are on an XLA device. It is traced once for each
    combination of shapes and dtypes, so reuse the same function object."""
    specs = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return _computation(function, specs, platform)(list(tensors))


@cache
def _computation(
    function: Callable[..., object], specs: tuple[tuple[tuple[int, ...], torch.dtype], ...], platform: str
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    wide = any(dtype in _WIDE for _, dtype in specs)
    with _jax_for_torch_xla(), jax.enable_x64(wide):
        traced = jax.jit(function, keep_unused=True).trace(*(_struct(*spec) for spec in specs))
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo")
    computation = xla_builder.computation_from_module_proto("ring_attn", module.as_serialized_hlo_module_proto())
    return xla_builder.xla_computation_as_func(computation, "ring_attn")


def _struct(shape: tuple[int, ...], dtype: torch.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(str(dtype).removeprefix("torch.")))


@contextmanager
def _jax_for_torch_xla() -> Iterator[None]:
    """Configures JAX for torch-xla: off the device that torch-xla holds, and with the partitioner that torch-xla uses."""
    config: Any = jax.config  # its attributes are created at run time
    if not config.jax_platforms:  # keep the user's choice
        jax.config.update("jax_platforms", "cpu")
    shardy = config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)
