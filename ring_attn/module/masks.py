"""Translates the masks of ``nn.MultiheadAttention`` into arguments of :func:`ring_attn.ring_attention`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """The masks of ``nn.MultiheadAttention`` as arguments of :func:`ring_attention`."""

    mask: Tensor | None
    bias: Tensor | None
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None


def split_mask(mask: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Splits torch's bool mask (True: not attended to) or float mask into a bool part, forbidden, and a finite additive part,
    of the mask's shape."""
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool (True is not attended to) or float (added to the logits), got {mask.dtype}")
    forbidden = mask == float("-inf")
    return forbidden, mask.masked_fill(forbidden, 0)


def joined_segments(
    padding: Tensor, query: Tensor, q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Segment ids ``[batch, seq]`` of both sides, in which keys padded by ``padding [batch, keys]`` are -1. Queries keep theirs,
    so a padded query still attends, as in torch."""
    if q_segment_ids is None and kv_segment_ids is None:
        q_segment_ids = torch.zeros(query.shape[:2], dtype=torch.int32, device=query.device)
        kv_segment_ids = torch.zeros_like(padding, dtype=torch.int32)
    q_ids = next(ids for ids in (q_segment_ids, kv_segment_ids) if ids is not None)
    kv_ids = q_ids if kv_segment_ids is None else kv_segment_ids
    if q_ids.shape != query.shape[:2] or kv_ids.shape != padding.shape:
        raise ValueError(
            f"q_segment_ids and kv_segment_ids must be {tuple(query.shape[:2])} and {tuple(padding.shape)}, got "
            f"{tuple(q_ids.shape)} and {tuple(kv_ids.shape)}; give both when queries and keys differ in length"
        )
    return q_ids, kv_ids.masked_fill(padding, -1)
