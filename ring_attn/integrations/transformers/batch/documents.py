"""The documents of a batch of transformers', and where transformers itself would see others."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ring_attn.documents.positions import of_text
from ring_attn.documents.reading import PACKING as PACKING
from ring_attn.documents.reading import Reading, begins_of, read_documents
from torch_bridge.call.sanity_checks import warn_once


def documents_of(
    tokens: Tensor, mask: Tensor | None, positions: Tensor | None, packing: Mapping[str, object], axes: int = 3
) -> tuple[Tensor | None, bool]:
    """Ids ``[batch, seq]`` of the documents (:mod:`ring_attn.documents`), negative on padding, None for one a row; and whether
    position ids tell them. ``axes``: how many coordinates ``position_ids [axes (+ 1), batch, seq]`` have.

    Warns where transformers' own masks, without flash attention, would let documents see each other, or keep others apart.
    """
    shape = tokens.shape[:2]
    _check_mask(mask, shape)
    sources = {**packing, "attention_mask": _integers(mask), "position_ids": positions}
    reading = read_documents(sources, shape, tokens.device, axes)
    _compare_with_transformers(reading, mask, positions if positions is None else of_text(positions, axes))
    return (reading.numbers if reading.source else None), reading.source == "position_ids"


def _integers(mask: Tensor | None) -> Tensor | None:
    return mask.long() if mask is not None and mask.is_floating_point() else mask


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


def _compare_with_transformers(reading: Reading, mask: Tensor | None, text: Tensor | None) -> None:
    """transformers' masks take position ids for documents where there is no mask, and nothing else."""
    real = reading.numbers >= 0
    theirs = torch.zeros_like(reading.numbers)
    if mask is None and text is not None:
        positions = text.to(theirs.device).expand(theirs.shape)
        theirs = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1).ne(1).cumsum(-1)
    theirs = begins_of(theirs.masked_fill(~real, -1))
    if not torch.equal(theirs, reading.begins):
        warn_once(
            f"{reading.source} tells {int(reading.begins.sum())} documents in this batch, and the ring keeps these apart; "
            f"transformers' own masks (sdpa, eager) would tell {int(theirs.sum())}: they read position_ids alone, and only without "
            "an attention_mask, while its flash attention reads cu_seq_lens and position_ids. Leave out what tells documents to "
            "have one a row"
        )
