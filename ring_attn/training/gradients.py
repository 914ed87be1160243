"""``sync_gradients``: the gradients of a model's parameters, summed over the ring that shares its sequence."""

import sys
from collections.abc import Iterable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.ring import Ring, as_ring
from ring_attn.sharding.reduction import agree, in_buckets, local_part, sum_over_ring, where
from ring_attn.training import batches
from ring_attn.training.early_sums import EarlySums, early_sums
from ring_attn.training.gradient_sums import gradient_state, note_sums
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.failures.watchdog import known_to_all
from torch_bridge.mesh.rings import MeshDim, MeshLike, ProcessRing
from torch_bridge.tracing import untraced

_BUCKET = 64 * 2**20  # bytes that are flattened and sent at a time
_MUST_AGREE = (
    "sync_gradients needs the same parameters in the same order, with gradients of the same shapes and dtypes, "
    "on every rank of the ring"
)
_COUNTED_TWICE = (
    "takes its mean over ranks of the ring already, and sync_gradients would count it again; leave sync_gradients out and multiply "
    "the loss by the number of ranks of that mean (docs/own-model.md)"
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
    overlap: bool = False,
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
        overlap: from the third call on, the sums begin while the backward runs, in copies of the gradients; results and mistakes
            that are told stay the same (docs/own-model.md). A call without it ends that. DTensors are summed in the call.

    Raises ValueError for a sparse gradient, for a gradient that DistributedDataParallel or FSDP has reduced over ranks of the ring
    already, for ``overlap`` of a module with such a wrapper over other ranks, and on all ranks where parameters differ, and where
    all gradients are sums over the ring already, whether a backward has added to them or not; :class:`ring_attn.PeerFailure` when
    another process of the ring died or stopped.
    """
    chosen = as_ring(ring, mesh, mesh_dim)
    trained = _trained(parameters)
    device = trained[0].device if trained else torch.device("cpu")
    processes = backend_of(device).resolve(chosen.mesh, chosen.mesh_dim)
    if len(processes.ranks_here) == processes.size:
        return
    assert isinstance(processes, ProcessRing)  # any other holds all shards
    _check_wrappers(parameters, processes, overlap)
    _check_gradients(trained, processes)
    _sum(trained, device, processes, overlap)


def in_ddp() -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel in whose forward this is, if in any."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def reduced_by_ddp(ring: Ring) -> bool:
    """Whether this is inside the forward of a DistributedDataParallel that will take a mean over ranks of the ring."""
    wrapper = in_ddp()
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return False
    return bool(_others(dist.get_process_group_ranks(wrapper.process_group), ring.processes))


def refuse_reduced_by_ddp() -> None:
    """Raises ValueError, on all ranks alike."""
    with known_to_all():
        raise ValueError(f"DistributedDataParallel {_COUNTED_TWICE}")


def check_overlap(overlap: bool) -> None:
    if overlap and in_ddp():
        raise ValueError(
            "context_parallel(overlap=True) sums copies of gradients that are made while the backward runs, and "
            "DistributedDataParallel changes gradients after that; leave overlap out"
        )


def _trained(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    tensors = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    strange = next((x for x in tensors if not isinstance(x, Tensor)), None)
    if strange is not None:
        raise ValueError(f"sync_gradients needs a module or its parameters, got {type(strange).__name__} among them")
    return list({id(x): x for x in tensors if x.requires_grad}.values())


@untraced
def _sum(trained: list[Tensor], device: torch.device, ring: ProcessRing, overlap: bool) -> None:
    early = early_sums(trained, ring)
    call = "; ".join([_call(trained), *map(str, early), *["overlap=True"] * overlap])
    agree(ring, device, call, _MUST_AGREE)
    # A parameter without a gradient anywhere keeps None: an optimizer would decay one that is zero.
    present = [x.grad is not None for x in trained]
    local = torch.tensor([*gradient_state(trained, ring), *present], dtype=torch.int64, device=device)
    parts = [batches.taken(ring, device).flatten(), local, *(sums.report(device) for sums in early)]
    known = sum_over_ring(torch.cat(parts), ring, "sync_gradients", call).cpu()
    rows, (summed, added_to, *with_gradient), *reports = (x.tolist() for x in known.split([len(part) for part in parts]))
    _check_batches([rows[i : i + batches.NUMBERS] for i in range(0, len(rows), batches.NUMBERS)], ring)
    _check_gradient_state(summed == ring.size, added_to == ring.size)
    left = {id(x): x for x, number in zip(trained, with_gradient, strict=True) if number}
    for parameter in left.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for sums, words in zip(early, reports, strict=True):
        for done in sums.finish(words, set(left), call):
            del left[done]
    _sum_now([local_part(x.grad) for x in left.values() if x.grad is not None], ring, call)
    note_sums(trained, ring)
    ids = {id(x) for x in trained}
    for sums, words in zip(early, reports, strict=True):
        if overlap:
            sums.choose(words, ids, call)
        else:
            sums.stop()
    if overlap:
        (early or [EarlySums(ring)])[0].add(trained)


def _sum_now(gradients: list[Tensor], ring: ProcessRing, call: str) -> None:
    pieces = (piece for gradient in gradients for piece in _pieces(gradient))
    for bucket in in_buckets(pieces, _BUCKET, lambda piece: (piece.dtype, piece.device, piece.nbytes)):
        total = sum_over_ring(torch.cat([gradient.reshape(-1) for gradient in bucket]), ring, "sync_gradients", call)
        parts = total.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view(gradient.shape) for gradient, part in zip(bucket, parts, strict=True)])


def _call(trained: list[Tensor]) -> str:
    """The call in words that differ where the parameters do."""
    specs = [(tuple(local_part(x).shape), str(x.dtype if x.grad is None else x.grad.dtype)) for x in trained]
    elements = sum(local_part(x).numel() for x in trained)
    return f"sync_gradients of {len(specs)} parameters, {elements} elements (checksum {crc32(repr(specs).encode()):08x})"


def _check_batches(ranks: list[list[int]], ring: ProcessRing) -> None:
    if batches.differ(ranks):
        with known_to_all():
            raise ValueError(
                f"sync_gradients: the ranks of the {ring} have made their losses of different batches, and each must shard the "
                "same whole batch: one seed and one order for all of them, and a sampler that goes by data-parallel ranks"
            )


def _check_gradient_state(summed: bool, added_to: bool) -> None:
    """Raises ValueError where the gradients of all ranks, and of all parameters, hold sums over the ring already."""
    if not summed and not added_to:
        return
    what = "a backward has added to sums over the ring" if added_to else "the gradients are sums over the ring already"
    with known_to_all():
        raise ValueError(
            f"sync_gradients: {what}, which would be counted again. Sum the gradients once, after the last backward() before the "
            "optimizer's step, not after each micro-batch, and drop them after it: zero_grad()"
        )


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """Rows of a gradient, about a bucket at a time: an embedding's is larger, and is copied three times on its way. Its shape alone
    says where it is cut, since ranks may have it in other strides."""
    if gradient.dim() == 0 or gradient.nbytes <= _BUCKET:
        return (gradient,)
    return gradient.split(max(1, _BUCKET * len(gradient) // gradient.nbytes))


def _check_gradients(trained: list[Tensor], ring: ProcessRing) -> None:
    for number, parameter in enumerate(trained):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"sync_gradients sums dense gradients; {_shown(number, parameter)} has one of layout {parameter.grad.layout} (an "
                "embedding with sparse=True makes such): make it dense"
            )
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and _others(mesh.mesh.flatten().tolist(), ring):
            raise ValueError(
                f"{_shown(number, parameter)} is a DTensor on a mesh with other ranks of the {ring}: FSDP {_COUNTED_TWICE}"
            )


def _shown(number: int, parameter: Tensor) -> str:
    return f"parameter {number}, {list(parameter.shape)},"


def _check_wrappers(parameters: nn.Module | Iterable[Tensor], ring: ProcessRing, overlap: bool) -> None:
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        for home, name in _REDUCING.items():
            wrapper = getattr(sys.modules.get(home), name, None)
            if not wrapper or not isinstance(module, wrapper):
                continue
            if _others(dist.get_process_group_ranks(module.process_group), ring):
                raise ValueError(f"{name} {_COUNTED_TWICE}, or give it a process group without other ranks of the {ring}")
            if overlap:
                raise ValueError(
                    f"overlap=True sums copies that are made while the backward runs, and {name} changes gradients after that; "
                    "leave overlap out"
                )


def _others(ranks: list[int], ring: ProcessRing) -> set[int]:
    """Other ranks of the ring among these."""
    return set(ranks) & set(ring.ranks) - {ring.ranks[ring.rank]}
