"""The TorchTPU backend (docs/contributing/torch_tpu.md). Experimental: traced and compiled without a TPU, never run on one.

It is the ring as custom ops that ``torch.tpu.pallas.jax_op`` makes from JAX functions.

torch-tpu owns the TPU and compiles what JAX has traced; JAX itself runs nothing there. A custom op is one program of the whole
world, in which equal rings that tile the world run side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import torch
import torch.distributed as dist
from jax.sharding import Mesh, PartitionSpec

from jax_core.experimental import warn_experimental
from jax_core.options import Placement
from torch_bridge.backends.interface import Operators
from torch_bridge.backends.operation import Request, Results, ShardProgram
from torch_bridge.mesh.protocol import AnyRing, Tensors
from torch_bridge.mesh.rings import AXIS, ProcessRing
from torch_bridge.mesh.rings import resolve as resolve

FORWARD, BACKWARD = "tpu_forward", "tpu_backward"  # custom ops in the namespace ring_attn, each name followed by a number
Grid = tuple[int, int, int]
T = TypeVar("T")


def check(query: torch.Tensor) -> None:
    """Raises NotImplementedError for float64."""
    if query.dtype == torch.float64:
        raise NotImplementedError("q, k and v must be bfloat16, float16 or float32 on a TPU, got float64; cast them")


@contextmanager
def tracing(ring: AnyRing, query: torch.Tensor) -> Iterator[None]:
    del ring, query
    keep_jax_on_cpu()
    yield


def program(request: Request) -> "CustomOpProgram":
    """With a ring of several processes, all processes of the world must make the call with equal shapes, dtypes and options, which
    are not compared. Raises NotImplementedError for rings that do not tile the world, ImportError without torch-tpu, RuntimeError
    if JAX would take the TPU."""
    keep_jax_on_cpu()
    warn_experimental('device "tpu" (TorchTPU)', "traced and compiled without a TPU, never run on one")
    return CustomOpProgram(operators(request).number)


def keep_jax_on_cpu() -> None:
    """A TPU has one owner, here torch-tpu; JAX computes on the CPU whatever tracing requires."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # made at run time
    if not platforms:
        jax.config.update("jax_platforms", "cpu")
    elif platforms.split(",")[0] != "cpu":
        raise RuntimeError(
            f"JAX must keep to the CPU beside torch-tpu, which holds the TPU; got platforms {platforms!r}; set JAX_PLATFORMS=cpu"
        )


def tile_world(ring: ProcessRing) -> Grid | None:
    """The world as a grid ``(before, ring, after)`` of rings like this one, in rank order; None for a ring of one.

    Raises NotImplementedError if there is no such grid, and for a ring over several mesh dimensions.
    """
    if ring.size == 1:
        return None
    if len(ring.axes) > 1:
        raise NotImplementedError(f"torch-tpu's programs have one mesh dimension for the sequence; got a {ring}; give one mesh_dim")
    world, first, step = dist.get_world_size(), ring.ranks[0], ring.ranks[1] - ring.ranks[0]
    even = ring.ranks == tuple(first + step * place for place in range(ring.size))
    if step < 1 or not even or world % (ring.size * step) or first % (ring.size * step) >= step:
        raise NotImplementedError(
            f"torch-tpu runs one program on all {world} processes, which equal rings of ascending, evenly spaced ranks must tile; "
            f"got a {ring}; take a dimension of a DeviceMesh of all ranks, or the default process group"
        )
    return world // (ring.size * step), ring.size, step


def forward(number: int, operands: Tensors) -> Results:
    out, lse = getattr(torch.ops.ring_attn, f"{FORWARD}_{number}")(_contiguous(operands))
    return out, lse


def backward(number: int, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
    # The same program whether or not a rank used all results.
    filled = [torch.zeros_like(x) if d is None else d for x, d in zip(results, cotangents, strict=True) if x is not None]
    return getattr(torch.ops.ring_attn, f"{BACKWARD}_{number}")(_contiguous((*operands, *results, *filled)), list(wanted))


def _contiguous(tensors: Tensors) -> list[torch.Tensor]:
    """The tensors that are not None, made contiguous: a custom op sees only a tensor's shape."""
    return [tensor.contiguous() for tensor in tensors if tensor is not None]


# Functions of a program's number: torch.compile can trace these, but not a method of an object.
OPERATORS = Operators(forward, backward)


@dataclass(frozen=True, eq=False)
class CustomOpProgram:
    """One request as two custom ops of its own: ``tpu_forward_N (Tensor[] operands) -> (Tensor out, Tensor lse)``, and
    ``tpu_backward_N (Tensor[] arrays, int[] wanted) -> Tensor[]`` of the operands, the results and their cotangents. ``wanted``
    holds indices into the request's specs."""

    operators: int

    def forward(self, operands: Tensors) -> Results:
        return forward(self.operators, operands)

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        return backward(self.operators, operands, results, cotangents, wanted)


class CustomOps(NamedTuple):
    """The two custom ops of a request, and the number in their names."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., list[torch.Tensor]]
    number: int


@cache
def operators(request: Request) -> CustomOps:
    """Checks the request and makes its custom ops."""
    assert isinstance(request.ring, ProcessRing)
    grid = tile_world(request.ring)
    local = request.operation.local(request, placement(grid))
    pallas = _pallas()
    world = None if grid is None else pallas.get_pallas_mesh(AXIS)
    number = operators.cache_info().misses  # the same on all ranks, which make their programs in the same order
    rows = None if world is None else PartitionSpec(AXIS)

    def operator(name: str, function: Callable[..., object]) -> Any:
        specs = {} if rows is None else dict(mesh=world, input_partition_specs=(rows, None), output_partition_specs=(AXIS,))
        return pallas.jax_op(f"ring_attn::{name}_{number}", function, **specs)

    of_rows = over_world(request, local, world, grid)
    return CustomOps(operator(FORWARD, of_rows[0]), operator(BACKWARD, of_rows[1]), number)


def _pallas() -> ModuleType:
    try:
        from torch.tpu import pallas  # type: ignore[import-not-found]  # torch-tpu installs it
    except ImportError as error:
        raise ImportError(
            'tensors on "tpu" need torch-tpu >= 0.2, for its torch.tpu.pallas, and JAX beside it; pip install "torch-tpu>=0.2"'
        ) from error
    return pallas


def placement(grid: Grid | None) -> Placement:
    if grid is None:
        return Placement(backend="tpu")
    generation = None
    with suppress(ImportError):  # that of torch-tpu is raised once the request is checked
        device = _pallas().get_pallas_mesh(AXIS).abstract_mesh.abstract_device
        generation = None if device is None else device.device_kind
    return Placement(axis_name=AXIS, size=grid[1], backend="tpu", generation=generation)


def over_world(
    request: Request, local: ShardProgram, world: Mesh | None, grid: Grid | None
) -> tuple[Callable[..., object], Callable[..., object]]:
    """Its forward and backward on arrays whose blocks of rows are the shards of the world's processes. As in
    :mod:`torch_bridge.backends.compiled`, no operand needs its own sharding. ``jax_op`` reads the functions' signatures."""
    rings, present = _rings(world, grid), [number for number, spec in enumerate(request.specs) if spec is not None]

    def spread(arrays: Sequence[jax.Array]) -> list[jax.Array | None]:
        """Put the arrays at the indices of the request's specs."""
        places = dict(zip(present, arrays, strict=False))
        return [places.get(number) for number in range(len(request.specs))]

    def local_forward(arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = local.forward(*spread(arrays))
        return out, lse

    def local_backward(arrays: Sequence[jax.Array], wanted: Sequence[int]) -> list[jax.Array]:
        gradients = local.backward(wanted, *spread(arrays), *arrays[len(present) :])
        return [x for x in gradients if x is not None]  # which all are: none of an integer operand is wanted

    def forward(operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _on_rows(rings, local_forward)(operands)

    def backward(arrays: Sequence[jax.Array], wanted: Sequence[int]) -> Sequence[jax.Array]:
        return _on_rows(rings, partial(local_backward, wanted=wanted))(arrays)

    return forward, backward


def _rings(world: Mesh | None, grid: Grid | None) -> Mesh | None:
    """The world's mesh with an axis for its rings; the mesh itself if the world is one ring."""
    if world is None or grid is None or grid[1] == world.size:
        return world
    return Mesh(world.devices.reshape(grid), ("before", AXIS, "after"))


def _on_rows(rings: Mesh | None, function: Callable[..., T]) -> Callable[..., T]:
    if rings is None:
        return function
    rows = PartitionSpec(rings.axis_names)
    return jax.shard_map(function, mesh=rings, in_specs=rows, out_specs=rows, check_vma=False)
