"""Sums over a ring, gathers and broadcasts by torch's collectives, each compared, watched, and its errors
propagated, as of every ring call."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_bridge.failures.events import recorded
from torch_bridge.failures.watchdog import compare, watch
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.start.runtime import start

HALF = (torch.float16, torch.bfloat16)
_LARGE = 2**16  # elements: two collectives of half the bytes are faster than one from here on
T = TypeVar("T")


def where(*arguments: object, ring: object = None, mesh: object = None, mesh_dim: object = None, **_: object) -> Any:
    """Mesh and mesh dimension of a call whose second argument is the mesh, for ``propagates_errors``."""
    mesh = arguments[1] if len(arguments) > 1 else mesh
    return getattr(ring, "mesh", mesh), getattr(ring, "mesh_dim", mesh_dim)


def agree(ring: ProcessRing, device: torch.device, call: str, must: str) -> None:
    """Returns once all ranks of the ring make the same ``call``; otherwise ValueError on all of them, with ``must`` in it."""
    _start(ring, device)
    compare(ring, call, must)


def _start(ring: ProcessRing, device: torch.device) -> None:
    """A job's first ring call of any kind, so that whatever follows is watched."""
    start(ring, device=device if device.type in ("cpu", "cuda") else None)


def sum_over_ring(tensor: Tensor, ring: ProcessRing, step: str, call: str) -> Tensor:
    """The sum over the ring of tensors of one shape, in their dtype. Half precision is summed in float32: it would round once per
    rank."""
    _start(ring, tensor.device)
    groups = ring.groups if ring.size > 1 else ()
    with watch(ring, step, call) as watched:
        if tensor.dtype in HALF and len(groups) == 1 and tensor.numel() >= _LARGE:
            total = _sum_of_halves(tensor, groups[0])
        else:
            total = tensor.to(summed_in(tensor.dtype), copy=True).contiguous()
            for group in groups:
                dist.all_reduce(total, group=group)
        watched.event = recorded(tensor.device)
    return total.to(tensor.dtype)


def _sum_of_halves(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank sums a part of all tensors in float32. What travels is 16 bits wide: half of an all-reduce in float32."""
    size, flat = group.size(), tensor.reshape(-1)
    missing = -flat.numel() % size
    padded = F.pad(flat, (0, missing)) if missing else flat
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    local = parts.view(size, -1).sum(0, dtype=torch.float32).to(tensor.dtype)
    dist.all_gather_into_tensor(parts, local, group=group)
    return parts[: flat.numel()].view(tensor.shape)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """What sums of tensors of this dtype are made in."""
    return torch.float32 if dtype in HALF else dtype


def in_buckets(items: Iterable[T], limit: int, spec: Callable[[T], tuple[torch.dtype, torch.device, int]]) -> Iterator[list[T]]:
    """Items of one dtype and device at a time, as many as make ``limit`` bytes. ``spec``: an item's dtype, device and bytes."""
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[T], int]] = {}
    for item in items:
        dtype, device, nbytes = spec(item)
        bucket, full = filling.get((dtype, device), ([], 0))
        bucket.append(item)
        filling[dtype, device] = bucket, full + nbytes
        if full + nbytes >= limit:
            yield filling.pop((dtype, device))[0]
    yield from (bucket for bucket, _ in filling.values())


def gather_from_ring(tensor: Tensor, ring: ProcessRing, step: str, call: str) -> Tensor:
    """The tensors of all ranks in ring order, ``[ring size, *tensor.shape]``."""
    _start(ring, tensor.device)
    gathered = tensor.contiguous()
    with watch(ring, step, call) as watched:
        for group in reversed(ring.groups) if ring.size > 1 else ():
            parts = [torch.empty_like(gathered) for _ in range(group.size())]
            dist.all_gather(parts, gathered, group=group)
            gathered = torch.stack(parts)
        watched.event = recorded(tensor.device)
    return gathered.view(ring.size, *tensor.shape)


def of_rank_0(tensor: Tensor, ring: ProcessRing, step: str) -> Tensor:
    """What the ring's first rank has, in the memory of ``tensor``, of one shape and dtype on all ranks."""
    if ring.size > 1:
        with watch(ring, step, str(list(tensor.shape))) as watched:
            dist.broadcast(tensor, src=ring.ranks[0], group=ring.group)
            watched.event = recorded(tensor.device)
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """What is here of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
