"""Where the documents of a packed batch begin and end, from whatever its collator says."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

CUMULATIVE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
NUMBERED = ("seq_idx", "segment_ids")
LONGEST = ("max_seqlen", "max_length_q", "max_length_k")


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


def read_documents(batch: Mapping[str, Any]) -> Documents:
    """From any of ``cu_seqlens``, ``seq_idx``, ``segment_ids``, an attention mask and position ids that restart, which must agree.

    Raises ValueError where they do not, and where position ids jump otherwise than back to their start.
    """
    shape = batch["input_ids"].shape
    numbers = dict(_numbered(batch, shape))
    real = torch.ones(shape, dtype=torch.bool)
    for number in numbers.values():
        real &= number >= 0
    mask = numbers.pop("attention_mask", None)
    if mask is not None and bool((mask > 0).any()):  # otherwise 0 and 1: padding alone
        numbers["attention_mask"] = mask
    tokens = real.flatten().nonzero().flatten()
    rows = _changes(tokens // max(1, shape[1]))
    firsts = {name: rows | _changes(number.flatten()[tokens]) for name, number in numbers.items()}
    if batch.get("position_ids") is not None:
        firsts["position_ids"] = _restarts(_positions(batch["position_ids"], shape).flatten()[tokens], rows)
    names = list(firsts)
    for name in names[1:]:
        if not torch.equal(firsts[name], firsts[names[0]]):
            raise ValueError(
                f"{names[0]} and {name} say that documents begin at different tokens ({int(firsts[names[0]].sum())} and "
                f"{int(firsts[name].sum())} documents); take the wrong one out of the batch"
            )
    found = Documents(tokens, firsts[names[0]] if names else rows)
    _check_longest(batch, found)
    return found


def _numbered(batch: Mapping[str, Any], shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """The document number of each token, negative on padding, by everything in the batch that says it."""
    for name in CUMULATIVE:
        if batch.get(name) is not None:
            yield name, _by_cumulative(name, batch[name], shape)
    for name in NUMBERED:
        if batch.get(name) is not None:
            yield name, _of_shape(name, batch[name], shape)
    if batch.get("attention_mask") is not None:
        yield "attention_mask", _of_shape("attention_mask", batch["attention_mask"], shape) - 1


def _by_cumulative(name: str, ends: Any, shape: torch.Size) -> Tensor:
    ends = torch.as_tensor(ends).cpu().long().flatten()
    total = shape.numel()
    if len(ends) < 1 or ends[0] != 0 or bool((ends.diff() < 0).any()) or ends[-1] > total:
        raise ValueError(f"{name} must ascend from 0 to at most the {total} tokens of the batch, got {ends.tolist()}")
    index = torch.arange(total)
    number = torch.searchsorted(ends, index, right=True) - 1
    return number.masked_fill(index >= ends[-1], -1).view(shape)


def _of_shape(name: str, numbers: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(numbers, Tensor) or numbers.shape != shape or numbers.is_floating_point():
        got = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"{name} must be integers of the shape of input_ids, {tuple(shape)}, got {got}")
    return numbers.cpu().long()


def _positions(position_ids: Tensor, shape: torch.Size) -> Tensor:
    if tuple(position_ids.shape) not in (tuple(shape), (1, shape[1]), (shape[1],)):
        raise ValueError(f"position_ids must have the shape of input_ids, {tuple(shape)}, got {tuple(position_ids.shape)}")
    return position_ids.cpu().long().expand(shape)


def _changes(values: Tensor) -> Tensor:
    """Where a value differs from the one before it; true at the first."""
    return torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])


def _restarts(positions: Tensor, rows: Tensor) -> Tensor:
    """Where a position does not follow the one before it. ``rows``: where a row begins."""
    first = rows.clone()
    first[1:] |= positions[1:] != positions[:-1] + 1
    start = positions[rows][rows.cumsum(0) - 1]  # that of the row's first token
    odd = first & (positions != 0) & (positions != start)
    if bool(odd.any()):
        at = int(odd.nonzero()[0])
        raise ValueError(
            f"position_ids must count on by one or restart at 0 (or where the row starts), but {int(positions[at - 1])} is "
            f"followed by {int(positions[at])}, so they do not say where documents begin; take them out of the batch and give "
            "cu_seqlens or segment_ids"
        )
    return first


def _check_longest(batch: Mapping[str, Any], documents: Documents) -> None:
    longest = max(documents.lengths, default=0)
    for name in LONGEST:
        if batch.get(name) is not None and int(batch[name]) < longest:
            raise ValueError(f"{name} is {int(batch[name])}, but a document has {longest} tokens")
