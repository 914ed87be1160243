"""Where verify takes a batch to tell documents: a reading of its own. What it measures must not be what measures it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def documents_of_batch(batch: Mapping[str, Any]) -> Tensor | None:
    """Ids ``[batch, seq]`` of each token's document; None where nothing tells more than one."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        return None
    shape = tokens.shape
    mask, positions, ends = (batch.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == shape else torch.ones(shape, dtype=torch.bool)
    real = real.to(tokens.device)
    numbered = isinstance(mask, Tensor) and mask.shape == shape and mask.dtype != torch.bool and bool((mask > 1).any())
    ids: Tensor
    if numbered and isinstance(mask, Tensor):
        ids = mask
    elif batch.get("seq_idx") is not None:
        ids = batch["seq_idx"].expand(shape)
    elif isinstance(ends, Tensor):
        ids = sum((torch.arange(shape[1]) >= end).long() for end in ends.tolist()[1:-1]) + torch.zeros(shape, dtype=torch.long)
    elif isinstance(positions, Tensor):
        ids = _restarts(positions, real).cumsum(-1).expand(shape)
    else:
        return None
    ids = ids.to(tokens.device).long().masked_fill(~real, -1)
    several = [len(row[row >= 0].unique()) > 1 for row in ids]
    return ids if any(several) else None


def _restarts(positions: Tensor, real: Tensor) -> Tensor:
    """Where a token's position is not beyond that of the token before it: ``[batch, seq]``. Of several rows of positions a first
    one of four is the text's; three are a place in time, height and width, and a document begins where all of them go back."""
    rows = positions[:1] if positions.ndim == 3 and positions.shape[0] == 4 else positions
    rows = rows if rows.ndim == 3 else rows.expand(real.shape)[None]
    back = (torch.diff(rows, dim=-1) <= 0).all(0)
    both = real[:, 1:] & real[:, :-1]
    return torch.nn.functional.pad(back & both, (1, 0))
