"""The documents of a packed batch as its placement wants them: the real tokens, row by row, in one line."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.documents import reading


class Documents(NamedTuple):
    """The real tokens of a batch ``[rows, seq]``, row by row: ``tokens [n]``, their indices in the flattened batch, and
    ``first [n]``, which of them begin a document. A document is in one row."""

    tokens: Tensor
    first: Tensor

    @property
    def lengths(self) -> list[int]:
        starts = self.first.nonzero().flatten()
        ends = torch.cat([starts, torch.tensor([len(self.tokens)])])
        return ends.diff().tolist()

    @property
    def numbers(self) -> Tensor:
        """``[n]``: the number of each token's document."""
        return self.first.cumsum(0) - 1

    @property
    def offsets(self) -> Tensor:
        """``[n]``: how far each token is from the first of its document."""
        return self.tokens - self.tokens[self.first][self.numbers]

    @property
    def in_one_piece(self) -> bool:
        """Whether no document has padding within."""
        return bool((self.tokens.diff()[~self.first[1:]] == 1).all())


def documents_in(numbers: Tensor, begins: Tensor) -> Documents:
    """From their ``numbers [rows, seq]``, negative on padding, and whether each token ``begins`` one."""
    tokens = (numbers >= 0).flatten().nonzero().flatten()
    return Documents(tokens, begins.flatten()[tokens])


def read_documents(batch: Mapping[str, Any]) -> Documents:
    """From whatever the batch has (:func:`ring_attn.documents.reading.read_documents`), on the CPU.

    Raises ValueError as that does, and where a number of a document comes back after another's: what is placed is one piece.
    """
    numbered = reading.read_documents(batch, batch["input_ids"].shape, torch.device("cpu"))
    begins = numbered.begins
    for row, first in zip(numbered.numbers, begins, strict=True):
        if len(row[first].unique()) < int(first.sum()):
            raise ValueError(
                f"{numbered.source} gives one number to tokens that are apart, and shard_packed places documents in one piece; "
                "number them apart, or use shard_batch, where equal ids attend to each other wherever they are"
            )
    return documents_in(numbered.numbers, begins)
