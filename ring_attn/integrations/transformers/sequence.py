"""One sequence of a batch, sharded: what its masks and its loss need to know of it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ring_attn.documents.table import Documents, of_numbers
from ring_attn.packed.ring import PlacedRing
from ring_attn.ring import Ring
from ring_attn.sharding.marks import mark_bounds

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Sequence:
    """One sharded sequence of a batch: that of a decoder, or of an encoder.

    ``length``: before padding to ``padded``, of which a rank has ``local`` positions. Of the whole, padded sequence
    ``[batch, padded]``: ``documents``, int32 ids, None where each entry is one document; ``hidden``, True at padding, None if only
    the end is padded. ``left``: ``[batch]``, the padding before each entry's first token, None where there is
    none. ``unfounded``: ``[batch, padded]``, that padding where a label is to be predicted from it, else None. ``position_ids``:
    of this rank's tokens, ``[batch, local]`` where the model makes them itself; ``positions``: the same, if transformers counts
    windows from the start of the documents that they tell, else None. ``highest``: the highest position id of the whole.
    ``bounds``: the documents as kernels take them (:mod:`ring_attn.documents.table`), where they can be told so. ``ring``: of this
    batch; where its documents are placed, it alone knows the order of the tokens.
    """

    ring: Ring
    batch: int
    length: int
    padded: int
    local: int
    device: torch.device
    documents: Tensor | None = None
    hidden: Tensor | None = None
    left: Tensor | None = None
    unfounded: Tensor | None = None
    position_ids: Tensor | None = None
    positions: Tensor | None = None
    highest: int = 0
    bounds: Documents | None = None

    @property
    def offsets(self) -> Tensor | None:
        """int64 ``[1, local]``: the positions that masks go by, where no layout tells them."""
        return self.ring.offsets if isinstance(self.ring, PlacedRing) else None

    def segments_with(self, keys: "Sequence", causal: bool) -> tuple[Tensor | None, Tensor | None]:
        """Segment ids of this rank's queries, and of its part of the keys; None where all see all. Padding is seen by nothing, but
        sees, as in transformers. ``causal``: what comes after the last token is not seen anyway."""
        at_end = keys.padded > keys.length and not causal
        if self.documents is None and keys.hidden is None and not at_end:
            return None, None
        queries, others = (x.documents if x.documents is not None else x.zeros() for x in (self, keys))
        unseen = torch.arange(keys.padded, device=keys.device) >= keys.length
        unseen = unseen if keys.hidden is None else unseen | keys.hidden
        bounds = self.bounds if self is keys else None
        parts = self.ring.shard(queries), self.ring.shard(others.masked_fill(unseen, -1))
        return mark_bounds(parts[0], bounds), mark_bounds(parts[1], bounds)

    def zeros(self) -> Tensor:
        return torch.zeros(self.batch, self.padded, dtype=torch.int32, device=self.device)

    def shard(self, whole: Tensor, fill: float = 0, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor, padded with ``fill``."""
        return self.ring.shard(self.ring.pad(whole, dim=dim, value=fill), dim=dim)


def describe(
    ring: Ring, tokens: Tensor, mask: Tensor | None, documents: Tensor | None, positions: Tensor | None, labels: Tensor | None
) -> Sequence:
    """The sequence of ``tokens [batch, seq, ...]``; ``mask [batch, seq]`` is 0 on padding; labels lie where they are predicted."""
    batch, length = tokens.shape[:2]
    padded = ring.pad(tokens.new_empty(1, length)).shape[1]
    sequence = Sequence(ring, batch, length, padded, padded // ring.size, tokens.device)
    highest = length - 1 if positions is None or not positions.numel() else int(positions.max())
    whole = None if documents is None else ring.pad(documents.to(torch.int32), value=-1)
    sequence = replace(sequence, documents=whole, highest=highest, bounds=_bounds(ring, documents))
    return sequence if mask is None or bool((mask != 0).all()) else replace(sequence, **_padding(sequence, mask, labels))


def _bounds(ring: Ring, documents: Tensor | None) -> Documents | None:
    if isinstance(ring, PlacedRing):
        return ring.piece_table
    return None if documents is None else of_numbers(documents)


def _padding(sequence: Sequence, mask: Tensor, labels: Tensor | None) -> dict[str, Any]:
    left = (mask.ne(0).cumsum(-1) == 0).sum(-1)
    before = torch.arange(sequence.padded, device=sequence.device) < left[:, None]
    predicted = labels is not None and bool((before[:, : sequence.length] & (labels != IGNORED)).any())
    return {
        "hidden": sequence.ring.pad(mask == 0, value=1),
        "left": left if bool(left.any()) else None,
        "unfounded": before if predicted else None,
    }
