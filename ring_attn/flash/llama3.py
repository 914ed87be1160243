"""The ``llama3`` functions of ring-flash-attention: contiguous shards of the whole packed sequence.

There K/V of all ranks are gathered, some heads at a time, and the rank's queries attend to the slice that their documents reach to.
Here they go round the ring like all others, so no rank ever holds more than three shards of them.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ring_attn.flash.arguments import Result, Window, attend, kvpacked, qkvpacked
from ring_attn.flash.varlen import check_slopes
from ring_attn.packed.ids import check_cumulative, documents_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.job.mesh import MeshLike

Prepared = tuple[Tensor, Tensor, int, int, slice]


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int, world_size: int) -> Prepared:
    """What ``llama3_flash_attn_varlen_func`` needs to know about this rank's shard.

    ``cu_seqlens [documents + 1]``: those of the whole sequence, whose length must be divisible by ``world_size``. Returns
    ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``: the documents in the shard's queries; those in the
    keys that they may see, from the start of the first document, to the shard's end if causal, or else to the end of the last one;
    and where those keys are in the whole sequence. Waits for a GPU."""
    ends = cu_seqlens.tolist()
    total = ends[-1]
    if total % world_size:
        raise ValueError(f"the sequence's length must be divisible by the size of the ring, got {total} and {world_size}")
    low, high = total // world_size * rank, total // world_size * (rank + 1)
    inside = [(start, stop) for start, stop in pairwise(ends) if start < high and stop > low]
    queries = [low] + [min(stop, high) for _, stop in inside]
    keys = [inside[0][0] if inside else low] + [min(stop, high) if causal else stop for _, stop in inside]
    q, k = ([end - side[0] for end in side] for side in (queries, keys))
    longest_q, longest_k = (max((b - a for a, b in pairwise(side)), default=0) for side in (q, k))
    return cu_seqlens.new_tensor(q), cu_seqlens.new_tensor(k), longest_q, longest_k, slice(keys[0], keys[-1])


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: MeshLike = None,
    *,
    softcap: float = 0.0,
) -> Result:
    """Attention within documents over contiguous shards of all tokens: ``q [tokens, heads, dim]``, ``k`` and ``v [tokens, kv_heads,
    dim]``.

    ``cu_seqlens_q`` to ``max_seqlen_k`` and ``local_k_slice``: from :func:`llama3_flash_attn_prepare_cu_seqlens`.
    ``heads_k_stride``, how many K/V heads to gather at a time, must divide their number, and has no effect: nothing is gathered.
    """
    check_slopes(alibi_slopes)
    if heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise ValueError(f"heads_k_stride must divide the number of K/V heads, {k.shape[1]}, got {heads_k_stride}")
    start = _shard_start(group, q)
    _check_documents(q, k, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), local_k_slice, start)
    document = documents_of(torch.arange(q.shape[0], dtype=cu_seqlens_q.dtype, device=q.device), cu_seqlens_q)
    return attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        group=group,
        qkv_format="thd",
        # Where its document starts in the whole sequence: a number that all ranks give to a document.
        q_segment_ids=local_k_slice.start + cu_seqlens_k[document],
    )


@torch.compiler.assume_constant_result
def _shard_start(group: MeshLike, q: Tensor) -> int:
    ring = backend_of(q.device).resolve(group, None)
    if len(ring.held) != 1:
        raise NotImplementedError("one process holds all shards here (torch-xla): use flash_attn_varlen_func, with whole tensors")
    return ring.held[0] * q.shape[0]


def _check_documents(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, longest: tuple[int, int], local_k_slice: slice, start: int
) -> None:
    """That the documents are those of this rank's shard: from their second on they start at one place on both sides, and so the
    queries' last ends within the keys'."""
    if k.shape[0] != q.shape[0] or cu_q.shape != cu_k.shape:
        raise ValueError(
            "queries and keys must be shards of one length with as many documents, got "
            f"{q.shape[0]} and {k.shape[0]} tokens, {len(cu_q) - 1} and {len(cu_k) - 1} documents"
        )
    check_cumulative("cu_seqlens_q", cu_q, q.shape[0], q.device, longest[0])
    check_cumulative("cu_seqlens_k", cu_k, local_k_slice.stop - local_k_slice.start, q.device, longest[1])
    apart = start + cu_q - (local_k_slice.start + cu_k)
    good = (apart[1:-1] == 0).all() & (apart[0] >= 0) & (apart[-1] <= 0) & (cu_q[-1] == q.shape[0])
    must = "cu_seqlens_q, cu_seqlens_k and local_k_slice must be those of this rank (llama3_flash_attn_prepare_cu_seqlens)"
    if q.device.type == "cuda" or torch.compiler.is_compiling():
        torch._assert_async(good, must)
    elif not bool(good):
        raise ValueError(f"{must}; got {cu_q.tolist()}, {cu_k.tolist()} and {local_k_slice} for tokens from {start}")


llama3_flash_attn_varlen_kvpacked_func = kvpacked(llama3_flash_attn_varlen_func)
llama3_flash_attn_varlen_qkvpacked_func = qkvpacked(llama3_flash_attn_varlen_func)
