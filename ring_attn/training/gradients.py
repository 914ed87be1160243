"""``sync_gradients``: the gradients of a model's parameters, summed over the ring that shares its sequence."""

import sys
from collections.abc import Iterable, Iterator
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.ring import Ring, one_ring
from ring_attn.sharding.reduction import agree, gather_from_ring, local_part, sum_over_ring, where
from ring_attn.training.gradient_record import ADDED_TO, CHANGED, GradientRecord, records_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.job.error_propagation import propagates_errors
from torch_bridge.job.mesh import MeshDim, MeshLike
from torch_bridge.job.mesh import Ring as ProcessRing

_BUCKET = 64 * 2**20  # bytes that are flattened and sent at a time
_ROUNDING = 1e-3  # relative: what it may make of one factor on two ranks
_MUST_AGREE = (
    "sync_gradients needs the same parameters in the same order, with gradients of the same shapes and dtypes, "
    "on every rank of the ring"
)
_COUNTED_TWICE = (
    "takes its mean over ranks of the ring already, and sync_gradients would count it again; leave sync_gradients out and multiply "
    "the loss by the number of ranks of that mean (docs/training.md)"
)
# Wrappers of a model that reduce its gradients over their process group in the backward.
_REDUCING = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
}


@propagates_errors(where)
@torch.no_grad()
def sync_gradients(
    parameters: nn.Module | Iterable[Tensor],
    mesh: MeshLike = None,
    *,
    mesh_dim: MeshDim = None,
    ring: Ring | None = None,
) -> None:
    """Replaces the gradient of each parameter by its sum over the ring, in place: a rank has computed the part of its own tokens.

    Call it once, after the last ``backward()`` before the optimizer's step (and before gradients are clipped or unscaled). It must
    not be called after each ``backward()`` of several whose gradients accumulate: what is summed already would be summed again.

    Collective: every rank of the ring calls it, with the same parameters in the same order. Parameters that need no gradient are
    left alone, and so are those without a gradient on every rank. Where only some ranks have one, the others add zero and get the
    sum as well. Gradients travel flattened, a few parameters at a time; half precision is summed in float32.

    Args:
        parameters: a module, or its parameters (those of one ring only). DTensors, of FSDP2 or tensor parallelism, are right as
            long as no other rank of the ring is in their mesh.
        mesh, mesh_dim, or ring: as for :func:`ring_attn.ring_attention`.

    Raises ValueError for a sparse gradient, for a gradient that DistributedDataParallel or FSDP has reduced over ranks of the ring
    already, and on all ranks where parameters differ; where the model is that of a ``ContextParallel`` also for sums to which a
    backward has added, and for gradients that each rank has clipped by its own norm; :class:`ring_attn.PeerFailure` when another
    process of the ring died or stopped.
    """
    chosen = one_ring(ring, mesh, mesh_dim)
    trained = _trained(parameters)
    device = trained[0].device if trained else torch.device("cpu")
    processes = backend_of(device).resolve(chosen.mesh, chosen.mesh_dim)
    if len(processes.held) == processes.size:
        return
    assert isinstance(processes, ProcessRing)  # any other holds all shards
    _check_wrappers(parameters, processes)
    _check_gradients(trained, processes)
    _sum(trained, device, processes)


def reduced_by_ddp(ring: Ring) -> bool:
    """Whether this is inside the forward of a DistributedDataParallel that takes a mean over ranks of the ring."""
    wrapper = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is not None and bool(_others(dist.get_process_group_ranks(wrapper.process_group), ring.processes))


def _trained(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    strange = next((x for x in given if not isinstance(x, Tensor)), None)
    if strange is not None:
        raise ValueError(f"sync_gradients needs a module or its parameters, got {type(strange).__name__} among them")
    return list({id(x): x for x in given if x.requires_grad}.values())


@torch.compiler.disable
def _sum(trained: list[Tensor], device: torch.device, ring: ProcessRing) -> None:
    records = records_of(trained)
    call = _call(trained, records)
    agree(ring, device, call, _MUST_AGREE)
    _check_story(records, device, ring, call)
    # A parameter without a gradient anywhere keeps None: an optimizer would decay one that is zero.
    present = torch.tensor([x.grad is not None for x in trained], dtype=torch.int32, device=device)
    held = sum_over_ring(present, ring, "sync_gradients", call).tolist()
    for parameter in (x for x, number in zip(trained, held, strict=True) if number and x.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    gradients = [local_part(x.grad) for x, number in zip(trained, held, strict=True) if number and x.grad is not None]
    for bucket in _buckets(piece for gradient in gradients for piece in _pieces(gradient)):
        total = sum_over_ring(torch.cat([gradient.reshape(-1) for gradient in bucket]), ring, "sync_gradients", call)
        for gradient, part in zip(bucket, total.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view(gradient.shape))
    for record in records:
        record.summed()


def _call(trained: list[Tensor], records: list[GradientRecord]) -> str:
    """The call in words that differ where the parameters do, or what became of their gradients."""
    forms = [(tuple(local_part(x).shape), str(x.dtype if x.grad is None else x.grad.dtype)) for x in trained]
    elements = sum(local_part(x).numel() for x in trained)
    stories = "".join(f", {story}" for record in records if (story := record.story()))
    return f"sync_gradients of {len(forms)} parameters, {elements} elements (checksum {crc32(repr(forms).encode()):08x}){stories}"


def _check_story(records: list[GradientRecord], device: torch.device, ring: ProcessRing, call: str) -> None:
    """Raises ValueError, on all ranks, for gradients whose sum would not be the whole sequence's."""
    if any(record.reduced_elsewhere for record in records):
        raise ValueError(f"DistributedDataParallel {_COUNTED_TWICE}")
    if ADDED_TO in call:
        for record in records:
            record.clear()
        raise ValueError(
            f"sync_gradients: {ADDED_TO}, which would be counted again. Sum the gradients once, after the last backward() before "
            "the optimizer's step, not after each micro-batch; zero_grad() drops them"
        )
    if CHANGED not in call:
        return
    mine = torch.cat([record.factors() for record in records])
    factors = gather_from_ring(mine.to(device), ring, "sync_gradients", call)
    if bool(((factors - factors[0]).abs() > _ROUNDING * factors[0].abs()).any()):
        raise ValueError(
            "sync_gradients: the gradients were changed since the backward by another factor on each rank of the ring, as by "
            "clipping each rank's own norm. Sum them first and clip then: cp.reduce_gradients(); clip_grad_norm_(...)"
        )


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """Rows of a gradient, about a bucket at a time: an embedding's is larger, and is copied three times on its way. Its shape alone
    says where it is cut, since ranks may have it in other strides."""
    if gradient.dim() == 0 or gradient.numel() == 0:
        return (gradient,)
    return gradient.split(max(1, _BUCKET * len(gradient) // gradient.nbytes))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one device and dtype at a time, as many as fit a bucket."""
    open_buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kind = gradient.device, gradient.dtype
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(gradient)
        if sum(x.nbytes for x in bucket) >= _BUCKET:
            yield open_buckets.pop(kind)
    yield from open_buckets.values()


def _check_gradients(trained: list[Tensor], ring: ProcessRing) -> None:
    for number, parameter in enumerate(trained):
        shown = f"parameter {number}, {list(parameter.shape)},"
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"sync_gradients sums dense gradients; {shown} has one of layout {parameter.grad.layout} (an embedding with "
                "sparse=True makes such): make it dense"
            )
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and _others(mesh.mesh.flatten().tolist(), ring):
            raise ValueError(f"{shown} is a DTensor on a mesh with other ranks of the {ring}: FSDP {_COUNTED_TWICE}")


def _check_wrappers(parameters: nn.Module | Iterable[Tensor], ring: ProcessRing) -> None:
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        for home, name in _REDUCING.items():
            wrapper = getattr(sys.modules.get(home), name, None)
            if wrapper and isinstance(module, wrapper) and _others(dist.get_process_group_ranks(module.process_group), ring):
                raise ValueError(f"{name} {_COUNTED_TWICE}, or give it a process group without other ranks of the {ring}")


def _others(ranks: list[int], ring: ProcessRing) -> set[int]:
    """Other ranks of the ring among these."""
    return set(ranks) & set(ring.ranks) - {ring.ranks[ring.rank]}
