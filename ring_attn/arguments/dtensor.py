"""Attention of DTensors: each process runs it on the parts that it holds. The mesh dimensions that the sequence is sharded over are
the ring; over one that heads or batch are sharded over nothing is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from jax_core.operands import Operands
from jax_core.options import Options
from torch_bridge.mesh.rings import MeshArg, resolve

Whole = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_BATCH, _SEQUENCE, _HEADS = "batch", "sequence", "heads"
_ROLES = (_BATCH, _SEQUENCE, _HEADS, "head dim")  # of the dimensions of query, key and value
Roles = tuple[str | None, ...]  # what each mesh dimension splits; None: nothing


class Split(NamedTuple):
    """How a call is split over its mesh."""

    mesh: DeviceMesh
    roles: Roles
    heads: int  # of the queries
    batch: int

    def parts(self, role: str) -> int:
        return self.over([axis_role == role for axis_role in self.roles])

    def over(self, chosen: Sequence[bool]) -> int:
        """The number of processes over the chosen mesh dimensions. A loop, for torch.compile cannot trace prod of a generator."""
        number = 1
        for dim, taken in enumerate(chosen):
            number *= self.mesh.size(dim) if taken else 1
        return number

    def first(self, role: str, whole: int) -> int:
        """The first index of the dimension that this process holds."""
        place = 0
        for dim, axis_role in enumerate(self.roles):
            if axis_role == role:
                place = place * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
                whole //= self.mesh.size(dim)
        return place * whole


def local_parts(
    where: MeshArg, names: Mapping[str, str], operands: Operands[Tensor], options: Options
) -> tuple[MeshArg, Operands[Tensor], Whole]:
    """The ring, and this process's parts of the operands of a call with DTensors; and what makes DTensors of its results.

    The placements of the query decide. Keys and values have the same; where they are replicated, and heads or batch of the query
    are not, this process's part is taken. So are the other operands, by the dimensions that they have; a plain tensor is taken for
    replicated, but for its queries or keys, which are this process's. Raises ValueError for placements that do not fit, and for
    shards of different sizes, NotImplementedError for a mask builder over sharded heads.
    """
    words = [names.get(name, name) for name in Operands._fields]
    for word, x in zip(words, operands.qkv, strict=False):
        if not isinstance(x, DTensor):
            raise ValueError(f"{', '.join(words[:3])} must all be DTensors or none; {word} is none: DTensor.from_local")
    query = operands.query
    assert isinstance(query, DTensor)
    split = Split(query.device_mesh, _roles(query, words[0]), query.shape[2], query.shape[0])
    if options.mask_builder is not None and _HEADS in split.roles:
        raise NotImplementedError("mask_builder is called for all heads, which are sharded here; use mask_mod, mask or bias")
    named = zip(Operands._fields, words, operands.given, strict=False)
    parts = operands.replaced(**{name: _part(split, name, word, x) for name, word, x in named if x is not None})
    parts = parts.replaced(softmax_aux=_for_each_head(split, parts.softmax_aux, operands.softmax_aux))
    if (options.dropout_prob or options.mask_mod is not None) and {_BATCH, _HEADS} & {*split.roles}:
        first = [split.first(_BATCH, query.shape[0]), split.first(_HEADS, query.shape[2])]
        parts = parts.replaced(origin=torch.tensor(first, dtype=torch.int32, device=query.device))
    batch, length, heads, _ = query.shape
    out_shape, lse_shape = (batch, length, heads, operands.value.shape[-1]), (batch, heads, length)

    def whole(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return _whole(split, out, out_shape, _ROLES[:3]), _whole(split, lse, lse_shape, (_BATCH, _HEADS, _SEQUENCE))

    return _ring(where, split), parts, whole


def where_sharded(query: DTensor, dim: int) -> MeshArg:
    """The mesh dimensions over which the query's dimension ``dim``, its sequence, is sharded; no ring if it is over none."""
    dims = tuple(index for index, placement in enumerate(query.placements) if placement == Shard(dim))
    return (query.device_mesh, dims) if dims else ("local", None)


def _roles(query: DTensor, name: str) -> Roles:
    roles: list[str | None] = []
    for dim, placement in enumerate(query.placements):
        if isinstance(placement, Replicate):
            roles.append(None)
        elif type(placement) is Shard and placement.dim != 3:
            roles.append(_ROLES[placement.dim])
        else:
            raise ValueError(
                f"{name} must be replicated, or sharded over batch, sequence or heads; got {placement!r} on mesh dimension "
                f"{_named(query.device_mesh, dim)}; call .redistribute() before"
            )
    return tuple(roles)


def _named(mesh: DeviceMesh, dim: int) -> str:
    return repr(mesh.mesh_dim_names[dim]) if mesh.mesh_dim_names else str(dim)


def _ring(where: MeshArg, split: Split) -> MeshArg:
    """The ring, which ``where`` may say too."""
    mesh, roles = split.mesh, split.roles
    if _SEQUENCE in roles:
        # DTensor splits over the mesh's dimensions from the first to the last.
        dims = tuple(dim for dim, role in enumerate(roles) if role == _SEQUENCE)
        here: MeshArg = mesh, dims
        if where[0] is not None and resolve(*where).ranks != resolve(*here).ranks:
            raise ValueError(
                f"the sequence is sharded over mesh dimension {', '.join(_named(mesh, dim) for dim in dims)}, a {resolve(*here)}, "
                f"but mesh= is a {resolve(*where)}; leave mesh out, or give that dimension"
            )
        return here if where[0] is None else where
    if where[0] is None:
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"these DTensors are on {mesh.size()} of {dist.get_world_size()} processes, and their sequence is not sharded over "
                'them; say where it is: mesh= and mesh_dim=, or mesh="local" if each holds the whole sequence'
            )
        return "local", None
    shared = set(resolve(*where).ranks) & set(mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        raise ValueError(
            f"mesh= is a {resolve(*where)}, but over ranks {sorted(shared)} of it the sequence of these DTensors is not sharded; "
            "shard it, or give the ring that it is sharded over"
        )
    return where


def _axes(split: Split, name: str, shape: Sequence[int]) -> dict[str, int]:
    """The dimension of the operand for each role that it has one for."""
    if name in ("query", "key", "value"):
        axes = {_BATCH: 0, _SEQUENCE: 1, _HEADS: 2}
    elif name in ("bias", "mask"):
        last = len(shape) - 4
        axes = {_BATCH: last, _HEADS: last + 1, _SEQUENCE: last + 2}
    elif name == "alibi_slopes":
        axes = {_BATCH: len(shape) - 2, _HEADS: len(shape) - 1}
    elif name == "softmax_aux":
        axes = {_HEADS: 0} if len(shape) == 2 or shape[0] == split.heads else {}
    else:
        axes = {_BATCH: len(shape) - 2, _SEQUENCE: len(shape) - 1}
    broadcasts = name not in ("query", "key", "value")
    return {role: axis for role, axis in axes.items() if axis >= 0 and not (broadcasts and shape[axis] == 1)}


def _part(split: Split, name: str, word: str, x: Tensor) -> Tensor:
    """This process's part of an operand. Its gradient is Partial on mesh dimensions where the operand is replicated."""
    axes = _axes(split, name, x.shape)
    needed: list[Placement] = [Replicate() if role not in axes else Shard(axes[role]) for role in split.roles]
    if not isinstance(x, DTensor):
        if name not in ("query", "key", "value"):
            _check_whole(split, word, x, axes)
        placements = [place if role == _SEQUENCE else Replicate() for role, place in zip(split.roles, needed, strict=True)]
        x = DTensor.from_local(x, split.mesh, placements, run_check=False)
    _check_placements(split, word, x, needed)
    # An operand that all processes hold whole has a part of its gradient where each computes something else with it.
    gradient = [
        Partial() if role is not None and isinstance(place, Replicate) else place
        for role, place in zip(split.roles, needed, strict=True)
    ]
    return x.redistribute(placements=needed).to_local(grad_placements=gradient)


def _check_whole(split: Split, word: str, x: Tensor, axes: dict[str, int]) -> None:
    """A plain tensor is taken for the whole operand. One of a part's size would be cut again, perhaps to a size that broadcasts."""
    for role, whole in ((_BATCH, split.batch), (_HEADS, split.heads)):
        if role in axes and x.shape[axes[role]] != whole:
            raise ValueError(
                f"{word} {list(x.shape)} must have {whole} in dimension {axes[role]}, as the queries: a plain tensor beside "
                "DTensors is taken whole; give the whole one, or a DTensor of the parts (DTensor.from_local)"
            )


def _check_placements(split: Split, word: str, x: DTensor, needed: list[Placement]) -> None:
    if x.device_mesh != split.mesh:
        raise ValueError(f"all DTensors of a call must be on one mesh; {word} is on {x.device_mesh}, the queries on {split.mesh}")
    for dim, (role, place, need) in enumerate(zip(split.roles, x.placements, needed, strict=True)):
        if place != need and not (isinstance(place, Replicate) and role != _SEQUENCE):
            raise ValueError(
                f"{word} must be {need!r} on mesh dimension {_named(split.mesh, dim)}, which splits {role or 'nothing'} of the "
                f"queries; got {place!r}; call .redistribute() before"
            )
    for axis in {need.dim for need in needed if isinstance(need, Shard)}:
        parts = split.over([need == Shard(axis) for need in needed])
        if x.shape[axis] % parts:
            raise ValueError(
                f"dimension {axis} of {word}, of size {x.shape[axis]}, must divide over the {parts} processes that it is sharded "
                "over; pad a sequence (ring_attn.pad), and replicate heads that are too few by repeating them"
            )


def _for_each_head(split: Split, sinks: Tensor | None, whole: Tensor | None) -> Tensor | None:
    """Sinks that all heads share, said for each head: there may be as many of them as this process has heads."""
    if sinks is None or whole is None or _axes(split, "softmax_aux", whole.shape):
        return sinks
    return sinks.expand(split.heads // split.parts(_HEADS), -1)


def _whole(split: Split, local: Tensor, shape: tuple[int, ...], axes: tuple[str, ...]) -> DTensor:
    placements = [Replicate() if role is None else Shard(axes.index(role)) for role in split.roles]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return DTensor.from_local(local, split.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
