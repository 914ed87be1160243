"""Documents given by ``cu_seqlens``, and queries counted from the last key, as segment and position ids of this rank's shards."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jax_core.masks.layout import Layout, runs
from jax_core.operands import EIGHTHS, Operands
from jax_core.options import Options
from ring_attn.arguments.local_lengths import warn_of_local_lengths
from ring_attn.documents.cumulative import check_cumulative, documents_of, or_padding, require
from ring_attn.documents.table import Documents, of_cumulative
from ring_attn.sharding.marks import bounds_of, ranks_of, shard_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.mesh.protocol import tensors_per_sequence
from torch_bridge.mesh.rings import MeshArg, MeshLike
from torch_bridge.tracing import constant

Given = tuple[Operands[Tensor], Options]
_EIGHTHS = tuple(range(EIGHTHS + 1))
_IDS = ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids")


@dataclass(frozen=True)
class Packing:
    """The arguments of a packed call, as flash-attn names them."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def given(self) -> bool:
        # torch.compile of torch 2.11 cannot trace vars().
        values = self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k
        return any(value is not None for value in values)


def with_documents(where: MeshArg, packing: Packing, qkv_format: str, operands: Operands[Tensor], options: Options) -> Given:
    """The operands and options of a call with the documents as a table of them, or as ids. Where queries and keys have the same
    documents their positions stay those of the layout, which need no arrays, unless something goes by the distance from a
    document's start."""
    cu_q, cu_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    twice = [name for name in _IDS if getattr(operands, name) is not None]
    if qkv_format != "thd" or cu_q is None or twice:
        raise ValueError(
            'cu_seqlens_q (and cu_seqlens_k, max_seqlen_q, max_seqlen_k) say where the documents of qkv_format="thd" are, instead '
            f"of ids; got qkv_format={qkv_format!r}, cu_seqlens_q={'none' if cu_q is None else 'given'} and ids {twice or 'none'}"
        )
    query, key, bottom_right = operands.query, operands.key, options.bottom_right
    same = cu_k is None or cu_k is cu_q
    if same and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"cu_seqlens_k must be given where queries and keys differ in length; got {query.shape[1]} and {key.shape[1]} tokens"
        )
    cu_k = cu_q if cu_k is None else cu_k
    if cu_k.shape != cu_q.shape:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one length, got {list(cu_q.shape)} and {list(cu_k.shape)}")
    per_sequence = tensors_per_sequence_of(where, query.device)
    longest = packing.max_seqlen_q, packing.max_seqlen_q if same and packing.max_seqlen_k is None else packing.max_seqlen_k
    padding = options.padding
    check_cumulative("cu_seqlens_q", cu_q, query.shape[1] * per_sequence, query.device, longest[0], padding)
    if not same or longest[0] != longest[1]:
        check_cumulative("cu_seqlens_k", cu_k, key.shape[1] * per_sequence, query.device, longest[1], padding)
    warn_of_local_lengths("cu_seqlens_q", cu_q, query.shape[1], query.shape[1] * per_sequence)
    options, relative = replace(options, bottom_right=False), options.chunk_size is not None or options.mask_mod is not None
    if same and not relative and (table := of_cumulative(cu_q)) is not None:
        return operands.replaced(documents=table), options
    q_index = index_of(where, options.layout, query)
    q_document = documents_of(q_index, cu_q)
    ids = dict(q_segment_ids=or_padding(q_document, cu_q))
    if same and not relative:
        return operands.replaced(**ids), options  # which serve both sides
    k_index = index_of(where, options.layout, key)
    k_document = documents_of(k_index, cu_k)
    shift = (cu_k - cu_q).roll(-1) if bottom_right else cu_k - cu_q
    starts = cu_k if relative else torch.zeros_like(cu_k)
    ids["kv_segment_ids"] = or_padding(k_document, cu_k)
    ids["q_position_ids"] = q_index + (shift - starts)[q_document]
    ids["kv_position_ids"] = k_index - starts[k_document]
    return operands.replaced(**ids), options


def as_documents(where: MeshArg, operands: Operands[Tensor], options: Options) -> Given:
    """With the documents in place of the segment ids, where those are known to be documents' and lie as this call's layout says:
    a table of documents goes by places, ids by rows. Raises ValueError for padding where there is to be none."""
    ids = operands.q_segment_ids, operands.kv_segment_ids
    if not options.padding:
        for name, numbers in zip(_IDS, ids, strict=False):
            if numbers is not None:
                require((numbers >= 0).all(), f"{name} must not be negative where padding=False says that all are in documents")
    documents = bounds_of(*ids)
    if documents is None or ids[0] is None or not _lie_as(documents, ids[0], where, operands, options.layout):
        return operands, options
    replaced = dict.fromkeys(_IDS if documents.placed else _IDS[:2])
    shared = _EIGHTHS[documents.shared_eighths]  # by which a compiled function has it as a number that it knows
    if shared != options.shared_eighths or (options.padding and not documents.padding):
        options = replace(options, padding=options.padding and documents.padding, shared_eighths=shared)
    return operands.replaced(**replaced, documents=documents.table), options


def _lie_as(documents: Documents, ids: Tensor, where: MeshArg, operands: Operands[Tensor], layout: Layout) -> bool:
    """Whether ids are the shards of the call's ring, in the call's layout, or with the positions of the placement; of a ring of one
    there is nothing to shard."""
    shard, ranks = shard_of(ids), _ranks(where, ids.device)
    if documents.placed:
        positions = bounds_of(operands.q_position_ids, operands.kv_position_ids)
        return ranks == documents.ring and positions is not None and positions.table is documents.table
    return ranks == () if shard is None else ranks == shard.ring and (not ranks or shard.layout == str(layout))


def with_positions(where: MeshArg, operands: Operands[Tensor], options: Options) -> Given:
    """The same for queries counted from the last key, where a static mask cannot say it."""
    if options.chunk_size is None and options.mask_mod is None and operands.alibi_slopes is None:
        return operands, options
    if operands.q_position_ids is not None or operands.kv_position_ids is not None:
        raise ValueError("bottom_right says where the queries are, and so do position ids; give one of the two")
    query, key = operands.query, operands.key
    by = (key.shape[1] - query.shape[1]) * tensors_per_sequence_of(where, query.device)
    options = replace(options, bottom_right=False)
    if not by:
        return operands, options
    q_index, k_index = (index_of(where, options.layout, x) for x in (query, key))
    return operands.replaced(q_position_ids=q_index + by, kv_position_ids=k_index), options


def ids_by_document(layout: str, cu_seqlens: Tensor, length: int, group: MeshLike) -> dict[str, Tensor]:
    """Segment and position ids ``[length]`` of this rank's tokens, whose ``cu_seqlens [documents + 1]`` are the local ones: each
    document is laid out over the ring by itself. Positions are those in the whole packed sequence."""
    rank, size = rank_in(group, cu_seqlens.device)
    index = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = documents_of(index, cu_seqlens)
    segments = {"q_segment_ids": or_padding(document, cu_seqlens)}
    if size == 1:
        return segments
    start, lengths = cu_seqlens[document], torch.cat([cu_seqlens.diff(), cu_seqlens[:1]])
    offset, local = index - start, lengths[document]
    if layout == "striped":
        offset = offset * size + rank
    elif layout == "contiguous":
        offset = rank * local + offset
    else:
        half = local // 2
        offset = torch.where(offset < half, rank * half + offset, (2 * size - 2 - rank) * half + offset)
    return {**segments, "q_position_ids": size * start + offset}


@constant
def rank_in(group: MeshLike, device: torch.device) -> tuple[int, int]:
    """This process's rank in the ring, and the ring's size."""
    ring = backend_of(device).resolve(group, None)
    if len(ring.ranks_here) != 1:
        raise NotImplementedError("one process holds all shards here (torch-xla): use flash_attn_varlen_func, with whole tensors")
    return ring.ranks_here[0], ring.size


@constant
def _ranks(where: MeshArg, device: torch.device) -> tuple[int, ...]:
    return ranks_of(backend_of(device).resolve(*where))


@constant
def tensors_per_sequence_of(where: MeshArg, device: torch.device) -> int:
    return tensors_per_sequence(backend_of(device).resolve(*where))


@constant
def _local_ranks(where: MeshArg, device: torch.device) -> tuple[tuple[int, ...], int]:
    """The ring ranks whose shards this process's tensor holds, and the size of the ring."""
    ring = backend_of(device).resolve(*where)
    return tuple(ring.ranks_here), ring.size


def index_of(where: MeshArg, layout: Layout, x: Tensor) -> Tensor:
    """``[seq]``: where the rows of a shard are in the whole sequence. torch.compile may hold the length for variable."""
    ranks, size = _local_ranks(where, x.device)
    pieces = [run for rank in ranks for run in runs(layout, rank, size, x.shape[1] // len(ranks))]
    ends = [(run.start, run.start + run.stride * run.length, run.stride) for run in pieces]
    return torch.cat([torch.arange(*end, dtype=torch.int32, device=x.device) for end in ends])
