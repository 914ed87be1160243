"""Packed documents, in any of the ways in which data collators tell them, as ids of each token's document."""

from typing import Any

import torch
from torch import Tensor

# What padding-free collators add for flash attention and for recurrent layers.
PACKING = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def documents_of(
    tokens: Tensor, mask: Tensor | None, positions: Tensor | None, packing: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """Ids ``[batch, seq]`` of the documents, None for one a row; and whether position ids tell them, as transformers reads them.

    ``mask``: 1 and 0, or the number of each token's document from 1 and 0 for padding. Position ids tell documents only where there
    is no mask: each token whose position does not follow the one before it begins one.
    """
    shape = tokens.shape[:2]
    _check_mask(mask, shape)
    by_position = mask is None and positions is not None and positions.ndim <= 2
    found = _restarts(positions.expand(shape)) if by_position and positions is not None else None
    if found is not None:
        return found, True
    if mask is not None and mask.dtype != torch.bool and bool((mask > 1).any()):
        return mask, False
    if "seq_idx" in packing:
        return packing["seq_idx"].to(tokens.device).expand(shape), False
    return (_between(packing, shape, tokens.device) if "cu_seq_lens_q" in packing else None), False


def _check_mask(mask: Tensor | None, shape: torch.Size) -> None:
    if mask is None:
        return
    if mask.ndim != 2:
        raise NotImplementedError(
            f"the attention mask {list(mask.shape)} is one for pairs of tokens, which no rank can hold; give a mask [batch, seq] "
            "of 1 and 0, documents by position_ids, or the model's and_mask_function and or_mask_function"
        )
    if mask.shape != shape:
        raise ValueError(f"the attention mask {list(mask.shape)} must be that of the whole sequence, {list(shape)}")


def _restarts(positions: Tensor) -> Tensor | None:
    first = positions[:, :1] - 1
    begins = torch.diff(positions, prepend=first, dim=-1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def _between(packing: dict[str, Any], shape: torch.Size, device: torch.device) -> Tensor:
    ends = packing["cu_seq_lens_q"].to(device)
    others = packing.get("cu_seq_lens_k")
    if others is not None and not torch.equal(ends, others.to(device)):
        raise NotImplementedError("cu_seq_lens_q and cu_seq_lens_k differ: queries and keys of one packed sequence have the same")
    if shape[0] != 1 or int(ends[-1]) != shape[1]:
        raise ValueError(f"cu_seq_lens must end at the length of the one packed row, got {int(ends[-1])} for tokens {list(shape)}")
    return torch.searchsorted(ends, torch.arange(shape[1], device=device), right=True)[None]
