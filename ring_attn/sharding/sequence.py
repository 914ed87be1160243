"""Helpers to lay torch tensors out on a ring: shards, whole sequences, padding, positions, and token batches with labels.

Everything follows from the arithmetic of ``jax_core.masks.layout``. No JAX is loaded, but by :func:`unshard` over a ring of
several processes, which meet as in every ring call. ``mesh`` is what
:func:`ring_attn.ring_attention` takes: a DeviceMesh (with ``mesh_dim`` when it has several dims), a ProcessGroup, ``"local"``,
or None for the default process group (a ring of one when torch.distributed is not initialised).

With tensors on an XLA device (docs/contributing/torch_xla.md) ``mesh`` is a torch-xla mesh, and one process holds the shards of all
ranks: there a "shard" is the whole sequence in the layout's order, split over the mesh's devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jax_core.masks.layout import Layout, Run, check_layout, check_shard_length, check_whole_length, padded_length, runs
from ring_attn.documents.reading import read_documents
from ring_attn.documents.table import of_numbers
from ring_attn.sharding import marks
from ring_attn.sharding.autograd import OfShard, OfWhole
from ring_attn.sharding.marks import Shard, mark_shard, ranks_of, refuse_other_layout, refuse_shard
from ring_attn.sharding.padding import carry_padding, note_padding
from ring_attn.sharding.reduction import agree, gather_from_ring, sum_over_ring, where
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call.error_propagation import propagates_errors, propagating
from torch_bridge.call.sanity_checks import note_layout
from torch_bridge.mesh.protocol import AnyRing
from torch_bridge.mesh.rings import MeshDim, MeshLike, ProcessRing
from torch_bridge.tracing import untraced

_MUST_AGREE = (
    "unshard needs the same shape, dtype, dim, layout, length and need of a gradient on every rank of the ring; pad the shards to "
    "one length first"
)


class ShardedBatch(NamedTuple):
    """This rank's shard of a batch of token sequences; each tensor is int64 ``[batch, shard length]`` in the layout's order.

    ``labels[:, i]`` is the token that follows ``input_ids[:, i]``, wherever in the ring that token lies, or the ignore index.
    ``position_ids`` are global. ``segment_ids`` are -1 on padding. ``length`` is the sequence length before padding, which
    :func:`unshard` takes to trim. ``num_labels`` is the number of labels over the whole ring, an int64 scalar tensor: what the sum
    of the ranks' losses is divided by (:func:`ring_attn.cross_entropy` does).
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    length: int
    num_labels: Tensor


def shard(
    tensor: Tensor, mesh: MeshLike = None, *, mesh_dim: MeshDim = None, dim: int = 1, layout: Layout = "contiguous"
) -> Tensor:
    """This rank's shard of a whole tensor: ``[..., S, ...] -> [..., S / ring size, ...]`` along ``dim``, in the layout's order.

    Every rank passes the same whole tensor; there is no communication. Any dtype and device. Differentiable: the gradient of a
    shard goes to its own positions and is zero elsewhere, which is the exact adjoint of the local computation. If the whole tensor
    is a replicated parameter, sum its gradient over the ring as for any parameter of a context-parallel model.

    The shard carries what it is: an attention call, :func:`unshard` or a further :func:`shard` that takes it for something else
    raises. A copy carries nothing.

    Raises ValueError for a ``dim`` out of range, an unknown layout, a length that the layout cannot split (see :func:`pad`), and
    what is one rank's part already.
    """
    dim = _checked_dim(tensor, dim)
    ring = _ring(mesh, mesh_dim, tensor.device)
    check_whole_length(layout, ring.size, tensor.shape[dim], f" in dim {dim}")
    if not torch.compiler.is_compiling():
        refuse_shard(tensor, "the tensor", ring, dim)
        note_layout(ring, layout, tensor.shape[dim] // ring.size)
    shards = _take(tensor, dim, _local_runs(layout, ring, tensor.shape[dim] // ring.size))
    if not torch.compiler.is_compiling():
        if len(ring.ranks_here) < ring.size:
            mark_shard(shards, Shard(ranks_of(ring), str(layout), dim, tensor.shape[dim]))
        carry_padding(tensor, shards, dim)
    return ring.split(shards, dim)


@propagates_errors(where)
def unshard(
    tensor: Tensor,
    mesh: MeshLike = None,
    *,
    mesh_dim: MeshDim = None,
    dim: int = 1,
    layout: Layout = "contiguous",
    length: int | None = None,
) -> Tensor:
    """The whole tensor in natural order, on every rank: ``[..., T, ...] -> [..., T * ring size, ...]`` along ``dim``.

    ``length`` trims it, undoing :func:`pad`. Collective: every rank of the ring calls it, with shards of one shape, dtype and
    need of a gradient; this is agreed on first, so that ranks that differ, and the others of a rank whose call is invalid, raise
    on all sides instead of hanging. As with :func:`ring_attn.ring_attention`, the first ring call of a job with several processes
    starts JAX on all of them: every process of the job must make one.

    Differentiable. The objective is the sum of the losses of all ranks, so a shard's gradient is the sum of the gradients that all
    ranks have for it (half precision is summed in float32). If every rank computes the same loss from the whole tensor, the
    objective counts it ring-size times: divide the loss by the ring size, or keep it on one rank
    and add ``0 * whole.sum()`` on the others. The backward is a collective too: every rank must reach it.

    Raises ValueError for a ``dim`` out of range, an unknown layout, a shard length that does not fit the layout, a ``length``
    longer than the whole, and shards that differ between ranks; torch_bridge.runtime.PeerFailure when another process of the ring
    died, stopped, or calls something else.
    """
    _check_tensor(tensor)
    ring = _ring(mesh, mesh_dim, tensor.device)
    if len(ring.ranks_here) == ring.size:
        return _natural_order(tensor, _checked_dim(tensor, dim), layout, ring, length)
    assert isinstance(ring, ProcessRing)  # any other holds all shards
    return _gathered(tensor, dim, layout, length, ring)


@untraced
def _gathered(tensor: Tensor, dim: int, layout: Layout, length: int | None, ring: ProcessRing) -> Tensor:
    with propagating(ring, tensor.device):  # under torch.compile, unshard does not
        call = _agreed(tensor, dim, layout, length, ring)
        dim = _checked_dim(tensor, dim)
        check_layout(layout, ring.size)
        check_shard_length(layout, tensor.shape[dim], size=ring.size)
        refuse_other_layout(tensor, "the shard", ring, dim, layout)
        _check_trim(length, tensor.shape[dim] * ring.size)
    whole: Tensor = _Unshard.apply(tensor, dim, layout, ring, call)
    return whole if length is None else whole.narrow(dim, 0, length)


def _agreed(tensor: Tensor, dim: int, layout: Layout, length: int | None, ring: ProcessRing) -> str:
    """The call in words, once all ranks of the ring make the same."""
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    call = f"unshard of {list(tensor.shape)} {tensor.dtype} {dim=} layout={str(layout)!r} {length=} requires_grad={needs_grad}"
    agree(ring, tensor.device, call, _MUST_AGREE)
    return call


def pad(
    tensor: Tensor,
    mesh: MeshLike = None,
    *,
    mesh_dim: MeshDim = None,
    dim: int = 1,
    layout: Layout = "contiguous",
    buckets: int = 0,
    value: float = 0,
) -> Tensor:
    """A whole tensor ``[..., length, ...]``, padded at the end of ``dim`` with ``value`` to the smallest length that the layout can
    split over the ring; with ``buckets``, to the smallest of that many such lengths between a power of two of the shortest and the
    next, so that few programs are compiled: at most 1 / ``buckets`` more.

    Returned as it is if it already fits. Mask the padding (segment id -1, or a key padding mask) unless the attention is
    causal, where no token sees what follows it: an attention call that would see it raises where it gets the padded shards
    themselves, and warns where it gets keys of their length. Differentiable; any dtype.

    Raises ValueError for a ``dim`` out of range, an unknown layout, ``buckets`` that are no count, and a ``value`` that the dtype
    cannot hold.
    """
    dim = _checked_dim(tensor, dim)
    size, length = _ring(mesh, mesh_dim, tensor.device).size, tensor.shape[dim]
    missing = padded_length(layout, size, length, buckets) - length
    _check_fill(value, tensor.dtype)
    shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
    padded = torch.cat([tensor, tensor.new_full(shape, value)], dim) if missing else tensor
    note_padding(padded, dim, length, size)
    return padded


def positions(
    length: int,
    mesh: MeshLike = None,
    *,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    buckets: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """This rank's global positions, int64 ``[shard length]``, of a sequence of ``length`` tokens padded as :func:`pad` does.

    These are the position ids for rotary or learned embeddings; those of the padding continue past ``length``.

    Raises ValueError for a negative length, an unknown layout and ``buckets`` that are no count.
    """
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    ring = _ring(mesh, mesh_dim, torch.get_default_device() if device is None else torch.device(device))
    local_length = padded_length(layout, ring.size, length, buckets) // ring.size
    if not torch.compiler.is_compiling():
        note_layout(ring, layout, local_length)
    shard_runs = _local_runs(layout, ring, local_length)
    return torch.cat([torch.arange(*_span(run), run.stride, dtype=torch.int64, device=device) for run in shard_runs])


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    buckets: int = 0,
    pad_id: int = 0,
    ignore_index: int = -100,
    shift_labels: bool = True,
) -> ShardedBatch:
    """This rank's shard of a whole batch of token sequences of any length: every rank of the ring passes the same batch. No
    communication; checksums are compared by what follows, by an attention call that is new to the ring and by
    :func:`ring_attn.sync_gradients`, which raise where the ranks hold different batches.

    All tensors are integers ``[batch, seq]`` in natural order, the same on every rank of the ring.

    - ``input_ids``: padded at the end with ``pad_id`` to a length that the layout can split, as :func:`pad` does with ``buckets``.
    - ``labels``: shifted here, before sharding, because the token that follows a shard's last one is on another rank: the
      label of position i is ``labels[i + 1]``, and that of the last position is ``ignore_index``. None takes ``input_ids``. Do not
      shift again in the loss. With ``shift_labels=False`` they must be given, already shifted.
    - ``segment_ids``: equal ids attend to each other, negative ones are padding. None: the documents that ``attention_mask`` or
      ``position_ids`` tell (docs/packed.md), or one.
    - ``attention_mask``: ``[batch, seq]`` of 1 (real) and 0 (padding, on either side), as tokenizers give it: 0 sets the
      segment id to -1. Other numbers are documents.
    - ``position_ids``: also ``[seq]`` or ``[1, seq]``. None counts from 0 through the whole sequence, segments included. Padding at
      the end has ids within ``[0, seq)``, which a learned embedding of ``seq`` positions has, too: 0, or the last one where they
      are counted here. Give masks that go by them the segment ids, too.

    Labels on padding are ``ignore_index``, and so are labels shifted here that would cross a segment boundary or be a padding
    token. Ranks hold different numbers of labels, so a mean loss is the local sum divided by ``num_labels``, the count of the whole
    ring: each rank's loss is then its share, and gradients are summed over the ring (:func:`ring_attn.cross_entropy`,
    :func:`ring_attn.sync_gradients`).

    Raises ValueError for shapes that differ, tensors that are not integers, ids that tell other documents than each other or leave
    them open, ``shift_labels=False`` without labels, an unknown layout, and ``buckets`` that are no count.
    """
    _check_batch(input_ids, labels, position_ids, segment_ids, attention_mask)
    if labels is None and not shift_labels:
        raise ValueError("shift_labels=False says that the labels are shifted already, but labels is None; pass the shifted labels")
    sources = {"position_ids": position_ids, "segment_ids": segment_ids, "attention_mask": attention_mask}
    documents = read_documents(sources, input_ids.shape, input_ids.device)
    segments = documents.numbers
    labels = _visible_labels(input_ids if labels is None else labels, segments, ignore_index, shift_labels)
    ring_options: dict[str, Any] = {"mesh": mesh, "mesh_dim": mesh_dim, "layout": layout}

    def local(tensor: Tensor, fill: int) -> Tensor:
        return shard(pad(tensor.long(), value=fill, buckets=buckets, **ring_options), **ring_options)

    length = input_ids.shape[1]
    if position_ids is None:
        counted = positions(length, device=input_ids.device, buckets=buckets, **ring_options).clamp_max(max(0, length - 1))
        local_positions = counted.expand(input_ids.shape[0], -1)
    else:
        local_positions = local(position_ids.expand(input_ids.shape), 0)
    num_labels = (labels != ignore_index).sum()
    local_segments = marks.mark_bounds(local(segments, -1), of_numbers(segments))
    batch = ShardedBatch(local(input_ids, pad_id), local(labels, ignore_index), local_positions, local_segments, length, num_labels)
    if not torch.compiler.is_compiling():
        marks.mark_batch(
            batch.input_ids, batch.labels, (input_ids, labels, position_ids, segments), _ring(mesh, mesh_dim, input_ids.device)
        )
        if documents.source is not None and bool((documents.begins.sum(1) > 1).any()):
            marks.mark_documents(batch.labels)
    return batch


def _ring(mesh: MeshLike, mesh_dim: MeshDim, device: torch.device) -> AnyRing:
    return backend_of(device).resolve(mesh, mesh_dim)


def _local_runs(layout: Layout, ring: AnyRing, length: int) -> tuple[Run, ...]:
    """The runs of positions of all shards held here, ``length`` positions per shard."""
    return tuple(run for rank in ring.ranks_here for run in runs(layout, rank, ring.size, length))


def _span(run: Run) -> tuple[int, int]:
    return run.start, run.start + run.stride * run.length


def _take(whole: Tensor, dim: int, shard_runs: tuple[Run, ...]) -> Tensor:
    """The positions of the given runs, taken by slicing, so that autograd's own adjoint is the right one."""
    before = (slice(None),) * dim
    parts = [whole[(*before, slice(*_span(run), run.stride))] for run in shard_runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def _natural_order(tensor: Tensor, dim: int, layout: Layout, ring: AnyRing, length: int | None) -> Tensor:
    """The whole tensor in natural order, from all shards, which are already here."""
    whole = tensor.shape[dim]
    check_whole_length(layout, ring.size, whole, f" in dim {dim}")
    _check_trim(length, whole)
    shard_runs = _local_runs(layout, ring, whole // ring.size)
    order = torch.cat([torch.arange(*_span(run), run.stride) for run in shard_runs]).argsort()
    return tensor.index_select(dim, order[:length].to(tensor.device))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: OfWhole, tensor: Tensor, dim: int, layout: Layout, ring: ProcessRing, call: str) -> Tensor:
        ctx.sum = dim, layout, ring, call, tensor.shape[dim]
        return _assemble(gather_from_ring(tensor, ring, "unshard", call).unbind(), dim, layout)

    @staticmethod
    def backward(ctx: OfWhole, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _SumOfShards.apply(grad, *ctx.sum), None, None, None, None


class _SumOfShards(torch.autograd.Function):
    """This rank's shard of the sum of all ranks' whole tensors; it and :class:`_Unshard` are each other's adjoint."""

    @staticmethod
    def forward(ctx: OfShard, whole: Tensor, dim: int, layout: Layout, ring: ProcessRing, call: str, length: int) -> Tensor:
        ctx.unshard = dim, layout, ring, call
        return _take(sum_over_ring(whole, ring, "unshard backward", call), dim, _local_runs(layout, ring, length))

    @staticmethod
    def backward(ctx: OfShard, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Unshard.apply(grad, *ctx.unshard), *[None] * 5


def _assemble(parts: Sequence[Tensor], dim: int, layout: Layout) -> Tensor:
    """Puts the shards of all ranks at their global positions."""
    length = parts[0].shape[dim]
    shape = [length * len(parts) if axis == dim else size for axis, size in enumerate(parts[0].shape)]
    whole = parts[0].new_empty(shape)
    before = (slice(None),) * dim
    for rank, part in enumerate(parts):
        offset = 0
        for run in runs(layout, rank, len(parts), length):
            whole[(*before, slice(*_span(run), run.stride))] = part.narrow(dim, offset, run.length)
            offset += run.length
    return whole


def _check_tensor(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a torch.Tensor is needed, got {type(tensor).__name__}")


def _checked_dim(tensor: Tensor, dim: int) -> int:
    _check_tensor(tensor)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim must be one of the {tensor.ndim} dims of the tensor {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.ndim


def _check_trim(length: int | None, whole: int) -> None:
    if length is not None and not 0 <= length <= whole:
        raise ValueError(f"length must lie between 0 and the length of the whole sequence, {whole}; got {length}")


def _check_fill(value: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    if dtype == torch.bool:
        fits = value in (0, 1)
    else:
        fits = float(value).is_integer() and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    if not fits:
        raise ValueError(f"value must be one that {dtype} can hold, got {value!r}; convert the tensor or choose another value")


def _check_batch(
    input_ids: Tensor, labels: Tensor | None, position_ids: Tensor | None, segment_ids: Tensor | None, attention_mask: Tensor | None
) -> None:
    _check_integers(input_ids, "input_ids")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [batch, seq], got shape {tuple(input_ids.shape)}; add the batch dim with unsqueeze(0)")
    others = {"labels": labels, "position_ids": position_ids, "segment_ids": segment_ids, "attention_mask": attention_mask}
    for name, tensor in others.items():
        if tensor is None:
            continue
        _check_integers(tensor, name, allow_bool=name == "attention_mask")
        shape, expected = tuple(tensor.shape), tuple(input_ids.shape)
        broadcast = name == "position_ids" and shape in (expected[1:], (1, expected[1]))
        if shape != expected and not broadcast:
            raise ValueError(f"{name} must have the shape of input_ids, {expected}, got {shape}; pass whole sequences")
        if tensor.device != input_ids.device:
            raise ValueError(f"{name} must be on the device of input_ids, {input_ids.device}, got {tensor.device}")


def _check_integers(tensor: Tensor, name: str, allow_bool: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor of integers, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or (tensor.dtype == torch.bool and not allow_bool):
        raise ValueError(f"{name} must hold integers (int64), got {tensor.dtype}")


def _visible_labels(labels: Tensor, segments: Tensor, ignore_index: int, shift: bool) -> Tensor:
    labels = labels.long()
    outside = segments < 0
    if shift:
        labels, following = (_shifted(tensor, fill) for tensor, fill in ((labels, ignore_index), (segments, -1)))
        outside = outside | (following != segments)
    return labels.masked_fill(outside, ignore_index)


def _shifted(tensor: Tensor, last: int) -> Tensor:
    return torch.cat([tensor[:, 1:], tensor.new_full((tensor.shape[0], 1), last)], 1)
