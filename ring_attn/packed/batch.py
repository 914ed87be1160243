"""``shard_packed``: every rank's part of a packed batch, with the work of its documents balanced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_core.masks.layout import Layout, rounded_up, shard_multiple
from ring_attn.documents.reading import PACKING
from ring_attn.packed.documents import Documents, read_documents
from ring_attn.packed.piece_table import piece_table
from ring_attn.packed.placement import place
from ring_attn.ring import BUCKETS, Ring, as_ring
from ring_attn.sharding.marks import mark_bounds, mark_documents, mark_labels
from ring_attn.sharding.sequence import unshard
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.mesh.rings import MeshDim, MeshLike

_READ = frozenset({"input_ids", "labels", "shift_labels", "position_ids", "attention_mask", *PACKING})


@dataclass(frozen=True)
class PackedShard:
    """This rank's part of a packed batch: tensors ``[1, shard length]``, reordered in a way no layout describes.

    - ``input_ids``, ``labels``: int64; ``labels[0, i]`` is the token that follows ``input_ids[0, i]`` in its document, or the
      ignore index. Do not shift them again.
    - ``position_ids``: for the model (rotary embeddings): as they were in the batch, or counted from each document's start.
    - ``segment_ids``: the number of the document, -1 on padding.
    - ``offsets``: the distance to the document's first token, which masks go by.
    - ``loss_weights``: float32, 1 / ``label_count`` where there is a label, else 0. The sum of ``loss * loss_weights`` over the
      shard, summed over the ring, is the mean loss; the gradients of all ranks are summed, too.
    - ``label_count``: the labels of the whole batch. ``others``: what else was in the batch, in the order of this shard.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    offsets: Tensor
    loss_weights: Tensor
    label_count: int
    others: dict[str, Tensor]
    ring: Ring
    shape: tuple[int, int]  # of the batch
    tokens: Tensor  # [n]: where the batch's real tokens are in it, flattened
    places: Tensor  # [n]: where they are in the shards of all ranks, joined

    @property
    def attention(self) -> dict[str, Tensor]:
        """The arguments of :func:`ring_attn.ring_attention` (beside the ring) that keep its documents apart, each
        ``[1, shard length]``."""
        return {"q_segment_ids": self.segment_ids, "q_position_ids": self.offsets}

    def unshard(self, tensor: Tensor) -> Tensor:
        """``[1, shard length, ...] -> [rows, seq, ...]``: the whole tensor in the order of the batch, on every rank; 0 on padding.

        Collective and differentiable as :func:`ring_attn.unshard`.
        """
        if tensor.ndim < 2 or tensor.shape[:2] != self.input_ids.shape:
            raise ValueError(f"unshard needs a tensor {list(self.input_ids.shape)} + [...], got {list(tensor.shape)}")
        whole = unshard(tensor, self.ring.mesh, mesh_dim=self.ring.mesh_dim)[0]
        rows, length = self.shape
        flat = whole.new_zeros(rows * length, *whole.shape[1:])
        return flat.index_copy(0, self.tokens, whole.index_select(0, self.places)).view(rows, length, *whole.shape[1:])


def shard_packed(
    batch: Mapping[str, Any],
    ring: Ring | None = None,
    *,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    pad_id: int = 0,
    ignore_index: int = -100,
    pad_to_multiple_of: int = 1,
    buckets: int = BUCKETS,
) -> PackedShard:
    """This rank's part of a packed batch. No communication: every rank passes the same batch.

    ``batch``: what a collator returns, ``input_ids`` ``[rows, seq]`` (TRL's and transformers' flattened batches have one row) and
    any of these, which must agree on where documents begin:

    - ``cu_seqlens``, or ``cu_seq_lens_q`` and ``_k``: ``[documents + 1]``, flash-attn's convention, over the flattened batch;
      tokens after the last document are padding.
    - ``position_ids`` that count on by one and restart at 0 with each document; beside another of these they may count through.
    - ``seq_idx`` or ``segment_ids`` ``[rows, seq]``: a number for each document, negative on padding.
    - ``attention_mask`` ``[rows, seq]``: 0 on padding; its other numbers are documents (axolotl's), unless all are 1.

    Without any of them each row is a document. ``labels`` (default: ``input_ids``) are shifted here, within documents;
    ``shift_labels`` are taken as they are. ``max_length_q`` and the like are checked. Any further tensor ``[rows, seq, ...]`` is
    sharded along, 0 on padding.

    Padding tokens are dropped and rows joined: a shard is ``[1, shard length]``. Documents are placed so that all ranks have equal
    lengths and nearly equal causal work, the sum of squared lengths: short ones whole on a rank, longer ones cut over all ranks in
    zigzag. What follows therefore has to use the shard's own ids: ``ring_attention(q, k, v, causal=True, **shard.attention)``, with
    any layout. Only arguments that go by the place in a sequence (bias, mask, mask_builder) have no meaning here.

    Shards are padded at their ends, to a multiple of ``pad_to_multiple_of``, and to one of ``buckets`` lengths an octave, as
    :class:`ring_attn.Ring` says (its own, if ``ring`` is given): a new length compiles a new program.

    Raises ValueError for sources that disagree, shapes that differ, and a key that is neither one of these nor such a tensor.
    """
    where = as_ring(ring, mesh, mesh_dim, layout, buckets)
    if not isinstance(where.layout, str):
        raise ValueError(
            f"shard_packed places documents itself; give it a ring without a plan, or shard_batch a plan; got {where.layout}"
        )
    input_ids = _checked(batch)
    documents = read_documents(batch)
    processes = backend_of(input_ids.device).resolve(where.mesh, where.mesh_dim)
    multiple = processes.size * int(np.lcm(pad_to_multiple_of, shard_multiple(where.layout)))
    total = max(multiple, rounded_up(len(documents.tokens), multiple, where.buckets))
    placement = place(documents.lengths, processes.size, total // processes.size)
    order = torch.from_numpy(placement.order(documents.lengths, total // processes.size))
    local = order.view(processes.size, -1)[list(processes.ranks_here)].flatten()

    def take(tensor: Tensor, fill: float) -> Tensor:
        """``[n, ...]``, for the real tokens, as the shard ``[1, shard length, ...]``."""
        index = local.to(tensor.device)
        padding = (index < 0).view(-1, *[1] * (tensor.ndim - 1))
        taken = tensor.index_select(0, index.clamp_min(0)) if len(tensor) else tensor.new_zeros(len(index), *tensor.shape[1:])
        return processes.split(taken.masked_fill(padding, fill)[None], 1)

    def real(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, documents.tokens.to(tensor.device))

    device = input_ids.device
    labels = _labels(batch, documents, real, ignore_index)
    offsets = documents.offsets.to(device)
    position_ids = batch.get("position_ids")
    positions = offsets if position_ids is None else real(position_ids.long().expand(input_ids.shape))
    count = int((labels != ignore_index).sum())
    numbers = torch.from_numpy(placement.numbers)[documents.numbers].to(device)
    shifted = take(labels, ignore_index)
    mark_labels(shifted, (real(input_ids), labels, positions, numbers), processes)
    if int(documents.first.sum()) > 1:
        mark_documents(shifted)
    bounds = piece_table(placement, documents, total, processes, device)
    return PackedShard(
        input_ids=take(real(input_ids.long()), pad_id),
        labels=shifted,
        position_ids=take(positions, 0),
        segment_ids=mark_bounds(take(numbers, -1), bounds),
        offsets=mark_bounds(take(offsets, 0), bounds),
        loss_weights=(shifted != ignore_index).float() / max(1, count),
        label_count=count,
        others={name: take(real(tensor), 0) for name, tensor in batch.items() if name not in _READ},
        ring=where,
        shape=(input_ids.shape[0], input_ids.shape[1]),
        tokens=documents.tokens.to(device),
        places=_places(order, len(documents.tokens)).to(device),
    )


def _checked(batch: Mapping[str, Any]) -> Tensor:
    """``input_ids``, once everything in the batch has a meaning here."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        raise ValueError("batch must be a mapping with input_ids [rows, seq], as collators return it")
    input_ids: Tensor = batch["input_ids"]
    shape = tuple(input_ids.shape)
    for name, value in batch.items():
        if name in _READ and name not in ("labels", "shift_labels"):
            continue
        if not isinstance(value, Tensor) or tuple(value.shape[:2]) != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a tensor of shape {list(shape)} + [...], got {got}; take it out of the batch")
    return input_ids


def _places(order: Tensor, count: int) -> Tensor:
    """Where each real token is in the order."""
    real = (order >= 0).nonzero().flatten()
    places = torch.empty(count, dtype=torch.int64)
    places[order[real]] = real
    return places


def _labels(batch: Mapping[str, Any], documents: Documents, real: Callable[[Tensor], Tensor], ignore_index: int) -> Tensor:
    """``[n]``: the label of each real token."""
    if batch.get("shift_labels") is not None:
        shifted: Tensor = real(batch["shift_labels"].long())
        return shifted
    labels = batch["input_ids"] if batch.get("labels") is None else batch["labels"]
    following = real(labels.long()).roll(-1)
    last = documents.first.roll(-1).to(following.device)  # the first token of all is a first one, so the last one is a last
    return following.masked_fill(last, ignore_index)
