"""A whole batch, as a data collator makes it, as this rank's part of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ring_attn.ring import Ring

IGNORED = -100
MARK = "ring_attn"  # the entry of a sharded batch that says so; the model's pre-forward hook takes it out


@dataclass(frozen=True)
class Sequence:
    """One sharded sequence of a batch: that of a decoder, or of an encoder.

    ``length``: before padding to ``padded``, which the layout splits into ``local`` positions per rank. ``documents``: int32 ids of
    the whole, padded sequence ``[batch, padded]``, None where each entry is one document. ``hidden``: likewise, True where a token
    is padding of the collator's. ``positions``: of this rank's tokens within their documents, where transformers counts so.
    ``left``: ``[batch]``, the padding before each entry's first token; None where no entry has any.
    """

    batch: int
    length: int
    padded: int
    local: int
    documents: Tensor | None
    hidden: Tensor | None
    left: Tensor | None
    positions: Tensor | None = None

    def segments(self, causal: bool) -> tuple[Tensor | None, Tensor | None]:
        """Ids of the whole sequence's queries and keys ``[batch, padded]``, None where all see all. Padding is seen by nothing, but
        sees, as it does in transformers. ``causal``: what comes after the last token is not seen anyway."""
        filled = self.padded > self.length and not causal
        if self.documents is None and self.hidden is None and not filled:
            return None, None
        shape = (self.batch, self.padded)
        device = next((x.device for x in (self.documents, self.hidden) if x is not None), None)
        queries = torch.zeros(shape, dtype=torch.int32, device=device) if self.documents is None else self.documents
        outside = torch.arange(self.padded, device=device) >= self.length
        unseen = outside if self.hidden is None else outside | self.hidden
        return queries, queries.masked_fill(unseen, -1)


class Sharded:
    """What the model's hooks and attention need to know of a sharded batch. No dataclass: FSDP takes those apart."""

    def __init__(self, owner: object, sequences: Mapping[str, Sequence], own: Mapping[str, Any], items: Any) -> None:
        self.owner, self.sequences, self.own, self.items = owner, dict(sequences), dict(own), items
