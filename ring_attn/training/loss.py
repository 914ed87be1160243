"""The loss of a model whose sequence is sharded over a ring, normalised over the whole ring.

Each rank's loss is its share: the shares add up to the loss of one process that has the whole sequence, and the gradients of the
parameters, summed over the ring (:func:`ring_attn.sync_gradients`), are its gradients.
"""

from typing import Unpack

import torch
from torch import Tensor

from ring_attn.packed.batch import PackedShard
from ring_attn.ring import OneByOne, Ring, as_ring
from ring_attn.sharding.reduction import agree, sum_over_ring, where
from ring_attn.sharding.sequence import ShardedBatch
from ring_attn.training.batches import note_loss
from ring_attn.training.token_losses import token_losses
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call.error_propagation import propagates_errors, propagating
from torch_bridge.mesh.rings import MeshArg, MeshDim, MeshLike, ProcessRing
from torch_bridge.tracing import untraced

_REDUCTIONS = ("mean", "sum", "none")
_ALL_COUNT = "cross_entropy counts labels over the ring: every rank of it must make the same call"
_ALL_ADD = "total_loss adds up the losses of all ranks of the ring: each must make the same call"


def where_counted(
    *arguments: object, ring: Ring | None = None, mesh: MeshLike = None, mesh_dim: MeshDim = None, **options: object
) -> MeshArg | None:
    """Mesh and mesh dimension of a call; None where it is not a collective and names no ring."""
    batch = arguments[1] if len(arguments) > 1 else options.get("batch")
    known = isinstance(batch, (ShardedBatch, PackedShard)) and options.get("weights") is None
    alone = known or options.get("num_items") is not None or options.get("reduction", "mean") != "mean"
    if alone and ring is None and mesh is None:
        return None
    return where(ring=ring, mesh=mesh, mesh_dim=mesh_dim)


@propagates_errors(where_counted)
def cross_entropy(
    logits: Tensor,
    batch: ShardedBatch | PackedShard | Tensor,
    *,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    num_items: int | Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """This rank's share of the mean cross entropy over all labels of the ring: the shares of all ranks add up to the loss.

    Call ``backward()`` on the share and sum the gradients of the parameters over the ring (:func:`ring_attn.sync_gradients`). The
    whole loss, to be shown, is :func:`total_loss` of the share. Without any label the loss is 0, and so are its gradients.

    Args:
        logits: ``[batch, seq of this shard, vocabulary]`` (or any dims before the last), for this rank's tokens. Half precision is
            converted to float32, large logits a few tokens at a time.
        batch: what :func:`ring_attn.shard_batch` or :func:`ring_attn.shard_packed` returned, which knows the number of labels of
            the whole ring: no communication. Or labels, integers of the logits' shape without the last dim, **shifted before they
            were sharded**: the label of a token is the token that follows. Then they are counted over the ring, which is a
            collective of all its ranks.
        ring, or mesh and mesh_dim: as for :func:`ring_attn.ring_attention`; needed only where labels or weights are summed over it.
        num_items: what the sum is divided by, instead of the count over the ring: for gradient accumulation, or for data
            parallelism beside the ring, the number of labels of all micro-batches, or of all rings.
        weights: one float for each label, of the same shape, without a gradient; the mean is then the weighted mean over the ring.
        reduction: "mean" as above; "sum", this rank's sum; "none", the losses one by one, in the labels' shape.
        ignore_index: labels that do not count, as in :func:`ring_attn.shard_batch`. label_smoothing: as in
            ``torch.nn.functional.cross_entropy``.

    Returns:
        A scalar (``reduction="none"``: one per label), float32 or, for float64 logits, float64.

    Raises ValueError for labels or weights that do not have the logits' shape, labels that are no integers, and ranks of the ring
    that do not make the same call; :class:`ring_attn.PeerFailure` when one of them died or stopped.
    """
    labels, count = labels_of(batch)
    count = count if weights is None else None  # of labels, not of their weights
    _check(logits, labels, weights, num_items, reduction)
    if not torch.compiler.is_compiling():
        note_loss(labels, logits.requires_grad and torch.is_grad_enabled())
    losses = token_losses(logits.flatten(0, -2), labels.flatten().long(), ignore_index, label_smoothing).view(labels.shape)
    losses = losses if weights is None else losses * weights.to(losses.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = count if num_items is None else num_items
    return mean_of(losses.sum(), labels, counted, weights, ignore_index, ring=ring, mesh=mesh, mesh_dim=mesh_dim)


@propagates_errors(where)
def total_loss(loss: Tensor, mesh: MeshLike = None, *, mesh_dim: MeshDim = None, ring: Ring | None = None) -> Tensor:
    """The sum of all ranks' shares of a loss, on every rank: the number to show. It has no gradient; call ``backward()`` on the
    share. Collective: every rank of the ring calls it, with a loss of one shape and dtype.

    Raises ValueError where the ranks of the ring do not make the same call.
    """
    if not isinstance(loss, Tensor):
        raise ValueError(f"loss must be a torch.Tensor, got {type(loss).__name__}")
    chosen = as_ring(ring, mesh, mesh_dim)
    return _total(loss.detach(), chosen, f"total_loss of {list(loss.shape)} {loss.dtype}", _ALL_ADD)


def labels_of(batch: ShardedBatch | PackedShard | Tensor) -> tuple[Tensor, int | Tensor | None]:
    """The labels, and their count over the ring where the batch knows it."""
    if isinstance(batch, ShardedBatch):
        return batch.labels, batch.num_labels
    return (batch.labels, batch.label_count) if isinstance(batch, PackedShard) else (batch, None)


def mean_of(
    total: Tensor, labels: Tensor, count: int | Tensor | None, weights: Tensor | None, ignore_index: int, **ring: Unpack[OneByOne]
) -> Tensor:
    """This rank's sum of losses, divided by the count; where that is None by the labels, or their weights, of the whole ring, which
    is given as to :func:`as_ring`."""
    number = _count(labels, weights, ignore_index, as_ring(**ring)) if count is None else count
    return total / _divisor(number)


def _count(labels: Tensor, weights: Tensor | None, ignore_index: int, ring: Ring) -> Tensor:
    """What the mean is taken over: the number of labels of the whole ring, or the sum of their weights."""
    counted = labels != ignore_index
    if weights is None:
        return _total(counted.sum(), ring, "cross_entropy of labels", _ALL_COUNT)
    exact = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
    weight = exact.masked_fill(~counted, 0).sum()
    return _total(weight, ring, f"cross_entropy of labels with weights in {weight.dtype}", _ALL_COUNT)


@untraced
def _total(number: Tensor, ring: Ring, call: str, must: str) -> Tensor:
    processes = backend_of(number.device).resolve(ring.mesh, ring.mesh_dim)
    if len(processes.ranks_here) == processes.size:
        return number
    assert isinstance(processes, ProcessRing)  # any other holds all shards
    with propagating(processes, number.device):  # under torch.compile, cross_entropy does not
        agree(processes, number.device, call, must)
    return sum_over_ring(number, processes, "loss", call)


def _divisor(num_items: int | Tensor) -> int | Tensor:
    """No label at all makes the loss 0 / 1."""
    return torch.where(num_items == 0, 1, num_items) if isinstance(num_items, Tensor) else num_items or 1


def _check(logits: Tensor, labels: Tensor, weights: Tensor | None, num_items: int | Tensor | None, reduction: str) -> None:
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        raise ValueError(
            "cross_entropy needs logits and the batch of ring_attn.shard_batch or shard_packed, or labels, as torch tensors; got "
            f"{type(logits).__name__} and {type(labels).__name__}"
        )
    if logits.ndim < 2 or not logits.is_floating_point() or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be floats of the labels' shape and the vocabulary, got logits {list(logits.shape)} {logits.dtype} and "
            f"labels {list(labels.shape)}; both are this rank's shards, and the labels are shifted before they are sharded"
        )
    check_labels(labels)
    check_num_items(num_items)
    if weights is not None and (weights.shape != labels.shape or not weights.is_floating_point()):
        raise ValueError(
            f"weights must be floats of the labels' shape, {list(labels.shape)}, got {list(weights.shape)}, {weights.dtype}"
        )
    if weights is not None and weights.requires_grad:
        raise ValueError("weights are data and get no gradient; detach them, or weight the losses of reduction='none'")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f'num_items is what the sum is divided by for reduction="mean"; got reduction={reduction!r}')


def check_labels(labels: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must hold integers (int64), got {labels.dtype}")


def check_num_items(num_items: int | Tensor | None) -> None:
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items must be one number, got a tensor of shape {list(num_items.shape)}")
    if isinstance(num_items, (int, float)) and num_items < 0:
        raise ValueError(f"num_items must not be negative, got {num_items}")
