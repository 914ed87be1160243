"""What a batch may say of its documents, and what is understood: the table of docs/packed.md, for every way into a ring."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Entries of a batch of one or more rows, and the number of each token's document in its row, -1 for padding; or the words of
    the error. ``told``: whether transformers' own masks would see others, which is warned of."""

    entries: dict[str, Any]
    understood: list[list[int]] | str
    told: bool = False

    @property
    def batch(self) -> dict[str, Tensor]:
        ids = torch.arange(1, 1 + self.shape[0] * self.shape[1]).view(self.shape)
        return {"input_ids": ids, **{name: torch.tensor(value) for name, value in self.entries.items()}}

    @property
    def shape(self) -> tuple[int, int]:
        whole = [torch.tensor(value) for name, value in self.entries.items() if not name.startswith("cu_")]
        return (whole[0].shape[-2], whole[0].shape[-1]) if whole else (1, 6)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether numbers of documents ``[rows, seq]`` mean the same: which tokens of a row are of one document, and which padding."""
    together = [(x[:, :, None] == x[:, None]) & (x >= 0)[:, :, None] & (x >= 0)[:, None] for x in (one, other)]
    return torch.equal(*together) and torch.equal(one >= 0, other >= 0)


TWO = [[0, 0, 0, 1, 1, 1]]
ONE = [[0, 0, 0, 0, 0, 0]]
RESTARTS, THROUGH, GAP = [[0, 1, 2, 0, 1, 2]], [[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 5, 6, 7]]
ONES, NUMBERS = [[1, 1, 1, 1, 1, 1]], [[1, 1, 1, 2, 2, 2]]

CASES = {
    "positions count on": Case({"position_ids": THROUGH}, ONE),
    "from elsewhere": Case({"position_ids": [[7, 8, 9, 10, 11, 12]]}, ONE),
    "positions restart": Case({"position_ids": RESTARTS}, TWO),
    "in one of two rows": Case({"position_ids": RESTARTS + THROUGH}, TWO + ONE),
    "where the row starts": Case({"position_ids": [[2, 3, 4, 2, 3, 4]]}, TWO),
    "documents of one token": Case({"position_ids": [[0, 0, 0, 1, 0, 0]]}, [[0, 1, 2, 2, 3, 4]]),
    "restarts and a mask of ones": Case({"position_ids": RESTARTS, "attention_mask": ONES}, TWO, told=True),
    "restarts and padding": Case(
        {"position_ids": [[0, 1, 0, 1, 2, 9]], "attention_mask": [[1, 1, 1, 1, 1, 0]]}, [[0, 0, 1, 1, 1, -1]], told=True
    ),
    "padding on the left": Case(
        {"position_ids": [[1, 1, 0, 1, 2, 3]], "attention_mask": [[0, 0, 1, 1, 1, 1]]}, [[-1, -1, 0, 0, 0, 0]]
    ),
    "padding within, counted": Case({"position_ids": THROUGH, "attention_mask": [[1, 1, 0, 0, 1, 1]]}, [[0, 0, -1, -1, 0, 0]]),
    "padding within, not counted": Case(
        {"position_ids": [[0, 1, 1, 1, 2, 3]], "attention_mask": [[1, 1, 0, 0, 1, 1]]}, [[0, 0, -1, -1, 0, 0]]
    ),
    "a gap": Case({"position_ids": GAP}, "2 is followed by 5, which may be a gap in a document or another document"),
    "a gap and a mask of ones": Case({"position_ids": GAP, "attention_mask": ONES}, "2 is followed by 5"),
    "back to elsewhere": Case({"position_ids": [[5, 6, 7, 2, 3, 4]]}, "7 is followed by 2"),
    "a gap in one document": Case({"position_ids": GAP, "segment_ids": ONE}, ONE, told=True),
    "a gap between two": Case({"position_ids": GAP, "segment_ids": TWO}, TWO),
    "restarts and a gap between documents": Case(
        {"position_ids": [[0, 1, 2, 0, 1, 2, 5, 6]], "segment_ids": [[0, 0, 0, 1, 1, 1, 2, 2]]}, [[0, 0, 0, 1, 1, 1, 2, 2]]
    ),
    "numbers of another length": Case(
        {"position_ids": THROUGH, "segment_ids": [[0, 0, 0, 1, 1, 1, 1]]},
        "segment_ids must (be integers of|have) the shape of input_ids",
    ),
    "a mask alone": Case({"attention_mask": [[0, 1, 1, 1, 1, 0]]}, [[-1, 0, 0, 0, 0, -1]]),
    "the mask numbers": Case({"attention_mask": NUMBERS}, TWO, told=True),
    "the mask numbers and pads": Case({"attention_mask": [[0, 1, 1, 2, 2, 0]]}, [[-1, 0, 0, 1, 1, -1]], told=True),
    "numbers beside restarts": Case({"attention_mask": NUMBERS, "position_ids": RESTARTS}, TWO, told=True),
    "numbers, and positions that count through": Case({"segment_ids": TWO, "position_ids": THROUGH}, TWO, told=True),
    "numbers other than restarts": Case({"segment_ids": [[0, 0, 1, 1, 1, 1]], "position_ids": RESTARTS}, "different tokens"),
    "one number, and restarts": Case({"segment_ids": ONE, "position_ids": RESTARTS}, "different tokens"),
    "segment ids": Case({"segment_ids": [[4, 4, 4, 2, 2, -1]]}, [[0, 0, 0, 1, 1, -1]], told=True),
    "segment ids and a mask": Case({"segment_ids": TWO, "attention_mask": [[0, 1, 1, 1, 1, 0]]}, [[-1, 0, 0, 1, 1, -1]], told=True),
    "ids of flash attention": Case({"cu_seq_lens_q": [0, 3, 6], "cu_seq_lens_k": [0, 3, 6], "position_ids": RESTARTS}, TWO),
    "cu_seqlens alone": Case({"cu_seqlens": [0, 3, 6]}, TWO, told=True),
    "cu_seqlens that end before": Case({"cu_seqlens": [0, 3, 5]}, [[0, 0, 0, 1, 1, -1]], told=True),
    "cu_seqlens of two rows": Case({"cu_seqlens": [0, 3, 6, 12], "position_ids": RESTARTS + THROUGH}, TWO + ONE),
    "seq_idx beside restarts": Case({"seq_idx": TWO, "position_ids": RESTARTS}, TWO),
    "cu_seqlens of the keys that differ": Case({"cu_seq_lens_q": [0, 3, 6], "cu_seq_lens_k": [0, 2, 6]}, "different tokens"),
    "cu_seqlens that are too long": Case({"cu_seqlens": [0, 3, 7]}, "at most the 6 tokens"),
}
