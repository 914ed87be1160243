"""The functions for packed documents, ``[tokens, heads, dim]`` with ``cu_seqlens``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_attn.flash.arguments import Result, Window, attend, kvpacked, qkvpacked
from ring_attn.packed.ids import check_cumulative, documents_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.job.mesh import MeshLike


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    group: MeshLike = None,
) -> Result:
    """flash-attn's function over a ring whose ranks hold contiguous shards of the tokens: ``q [tokens, heads, dim]``, ``k`` and
    ``v [tokens, kv_heads, dim]``; ``cu_seqlens_q`` and ``cu_seqlens_k [documents + 1]`` are those of the whole sequence, the same
    on all ranks. See :mod:`ring_attn.flash`."""
    if block_table is not None:
        raise NotImplementedError("a block_table pages a K/V cache, which a ring does not have; pass keys and values as tensors")
    check_slopes(alibi_slopes)
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
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        bottom_right=True,
    )


def check_slopes(alibi_slopes: Tensor | None) -> None:
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        raise NotImplementedError("packed documents share one batch entry: alibi_slopes must be [heads], not one row a document")


Offsets = Callable[[Tensor, Tensor, int, int], Tensor]  # (offset in the local document, its length, rank, size) -> in the document


def _in_layout(name: str, layout: str, offsets: Offsets, multiple: int = 1) -> Callable[..., Any]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
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
        check_slopes(alibi_slopes)
        check_cumulative("cu_seqlens", cu_seqlens, q.shape[0], q.device, max_seqlen)
        _check_multiple(name, cu_seqlens, multiple)
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
            **_ids(cu_seqlens, q.shape[0], _place(group, q.device), offsets),
        )

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"Attention within documents, each laid out over the ring by itself ({layout}); ``cu_seqlens`` are those of this rank's "
        "tokens, the same on all ranks. See :mod:`ring_attn.flash`."
    )
    return function


@torch.compiler.assume_constant_result
def _place(group: MeshLike, device: torch.device) -> tuple[int, int]:
    """This process's rank in the ring, and the ring's size."""
    ring = backend_of(device).resolve(group, None)
    if len(ring.held) != 1:
        raise NotImplementedError("one process holds all shards here (torch-xla): use flash_attn_varlen_func, with whole tensors")
    return ring.held[0], ring.size


def _ids(cu_seqlens: Tensor, length: int, place: tuple[int, int], offsets: Offsets) -> dict[str, Tensor]:
    """Segment and position ids ``[tokens]`` of the local tokens. Positions are those in the whole packed sequence."""
    rank, size = place
    index = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = documents_of(index, cu_seqlens)
    padding = document == len(cu_seqlens) - 1
    segments = document.masked_fill(padding, -1)
    if size == 1:
        return {"q_segment_ids": segments}
    start, lengths = cu_seqlens[document], torch.cat([cu_seqlens.diff(), cu_seqlens[:1]])
    positions = size * start + offsets(index - start, lengths[document], rank, size)
    return {"q_segment_ids": segments, "q_position_ids": positions}


def _check_multiple(name: str, cu_seqlens: Tensor, multiple: int) -> None:
    if multiple == 1:
        return
    good = (cu_seqlens % multiple == 0).all()
    must = f"{name} needs documents whose local length is divisible by {multiple}: the two chunks that a rank holds of each"
    if cu_seqlens.device.type == "cuda" or torch.compiler.is_compiling():
        torch._assert_async(good, must)
    elif not bool(good):
        raise ValueError(f"{must}; got cu_seqlens {cu_seqlens.tolist()}")


def _contiguous(offset: Tensor, length: Tensor, rank: int, size: int) -> Tensor:
    del size
    return rank * length + offset


def _zigzag(offset: Tensor, length: Tensor, rank: int, size: int) -> Tensor:
    half = length // 2
    return torch.where(offset < half, rank * half + offset, (2 * size - 2 - rank) * half + offset)


def _striped(offset: Tensor, length: Tensor, rank: int, size: int) -> Tensor:
    del length
    return offset * size + rank


ring_flash_attn_varlen_func = _in_layout("ring_flash_attn_varlen_func", "contiguous", _contiguous)
zigzag_ring_flash_attn_varlen_func = _in_layout("zigzag_ring_flash_attn_varlen_func", "zigzag", _zigzag, multiple=2)
stripe_flash_attn_varlen_func = _in_layout("stripe_flash_attn_varlen_func", "striped", _striped)

flash_attn_varlen_kvpacked_func = kvpacked(flash_attn_varlen_func)
ring_flash_attn_varlen_kvpacked_func = kvpacked(ring_flash_attn_varlen_func)
ring_flash_attn_varlen_qkvpacked_func = qkvpacked(ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_kvpacked_func = kvpacked(zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_varlen_func)
stripe_flash_attn_varlen_kvpacked_func = kvpacked(stripe_flash_attn_varlen_func)
stripe_flash_attn_varlen_qkvpacked_func = qkvpacked(stripe_flash_attn_varlen_func)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: MeshLike = None,
) -> Result:
    """:func:`flash_attn_varlen_func` with ``qkv [tokens, 3, heads, dim]`` and one ``cu_seqlens [documents + 1]``."""
    result: Result = qkvpacked(flash_attn_varlen_func)(
        qkv,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        group=group,
    )
    return result
