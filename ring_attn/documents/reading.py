"""Where the documents of a batch are, by whatever its collator says. docs/packed.md has the definition as a table of cases."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.documents.cumulative import documents_of, or_padding
from ring_attn.documents.positions import Jumps, check_unambiguous, jumps_of, last_real, of_text

CUMULATIVE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
NUMBERED = ("seq_idx", "segment_ids")
LONGEST = ("max_seqlen", "max_length_q", "max_length_k")
PACKING = (*CUMULATIVE, *NUMBERED, *LONGEST)  # what says nothing but where documents are


class Reading(NamedTuple):
    """``numbers [rows, seq]``, int64: tokens of a row with one number are one document, negative ones are padding. ``source``: the
    entry that says so; None where each row is one document."""

    numbers: Tensor
    source: str | None

    @property
    def begins(self) -> Tensor:
        """bool ``[rows, seq]``: the real tokens that are the first, or have another number than the real one before."""
        return begins_of(self.numbers)


def begins_of(numbers: Tensor) -> Tensor:
    real = numbers >= 0
    last = last_real(real)
    return real & ((last < 0) | (numbers != numbers.gather(1, last.clamp_min(0))))


def read_documents(batch: Mapping[str, Any], shape: torch.Size, device: torch.device, axes: int | None = None) -> Reading:
    """From any of ``cu_seqlens`` (``cu_seq_lens_q``, ``cu_seq_lens_k``), over the flattened batch ``[rows, seq]``; ``seq_idx``,
    ``segment_ids``; an attention mask, 0 on padding, whose numbers are documents unless all are 1; and, where none of these tells,
    ``position_ids`` that restart. ``axes``: as for :func:`of_text`.

    Raises ValueError where they disagree, where position ids alone leave it open, and for other shapes.
    """
    sources = {name: numbers.to(device) for name, numbers in _document_numbers(batch, shape)}
    real = torch.ones(shape, dtype=torch.bool, device=device)
    for numbers in sources.values():
        real &= numbers >= 0
    mask = sources.get("attention_mask")
    if mask is not None and not bool((mask > 0).any()):
        del sources["attention_mask"]  # padding alone
    sources = {name: numbers.masked_fill(~real, -1) for name, numbers in sources.items()}
    names = list(sources)
    for name in names[1:]:
        _check_agreed(names[0], begins_of(sources[names[0]]), name, begins_of(sources[name]))
    positions, jumps = _positions(batch.get("position_ids"), real, axes)
    if names:
        reading = Reading(sources[names[0]], names[0])
        if jumps is not None:
            _check_restarts(reading, jumps)
    elif jumps is not None and positions is not None:
        check_unambiguous(positions, jumps)
        numbers = jumps.restarts.cumsum(1).masked_fill(~real, -1)
        reading = Reading(numbers, "position_ids" if bool(jumps.restarts.any()) else None)
    else:
        reading = Reading(real.long() - 1, None)
    _check_longest(batch, reading)
    return reading


def _document_numbers(batch: Mapping[str, object], shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """The document number of each token, negative on padding, by everything in the batch that says it."""
    for name in CUMULATIVE:
        if batch.get(name) is not None:
            yield name, _by_cumulative(name, batch[name], shape)
    for name in NUMBERED:
        if batch.get(name) is not None:
            yield name, _of_shape(name, batch[name], shape)
    if batch.get("attention_mask") is not None:
        mask = _of_shape("attention_mask", batch["attention_mask"], shape)
        if bool((mask < 0).any()):
            raise ValueError("attention_mask must not be negative: 0 is padding, 1 a token, and other numbers are documents")
        yield "attention_mask", mask - 1


def _by_cumulative(name: str, ends: object, shape: torch.Size) -> Tensor:
    ends, total = torch.as_tensor(ends).long().flatten(), shape.numel()
    if len(ends) < 1 or ends[0] != 0 or bool((ends.diff() < 0).any()) or ends[-1] > total:
        raise ValueError(f"{name} must ascend from 0 to at most the {total} tokens of the batch, got {ends.tolist()}")
    index = torch.arange(total, device=ends.device)
    return or_padding(documents_of(index, ends), ends).long().view(shape)


def _of_shape(name: str, numbers: object, shape: torch.Size) -> Tensor:
    if not isinstance(numbers, Tensor) or numbers.shape != shape or numbers.is_floating_point():
        got = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"{name} must be integers of the shape of input_ids, {tuple(shape)}, got {got}")
    return numbers.long()


def _positions(position_ids: Tensor | None, real: Tensor, axes: int | None) -> tuple[Tensor | None, Jumps | None]:
    text = None if position_ids is None else of_text(position_ids, axes)
    if text is None:
        return None, None
    if tuple(text.shape) not in (tuple(real.shape), (1, real.shape[1]), (real.shape[1],)):
        raise ValueError(f"position_ids must have the shape of input_ids, {tuple(real.shape)}, got {tuple(text.shape)}")
    positions = text.to(real.device).long().expand(real.shape)
    return positions, jumps_of(positions, real)


def _check_agreed(name: str, begins: Tensor, other: str, others: Tensor) -> None:
    if not torch.equal(begins, others):
        raise ValueError(
            f"{name} and {other} say that documents begin at different tokens ({int(begins.sum())} and {int(others.sum())} "
            "documents); take the wrong one out of the batch"
        )


def _check_restarts(reading: Reading, jumps: Jumps) -> None:
    """Position ids beside what tells documents may count through all of a row, or restart, then just where documents begin."""
    within = last_real(reading.numbers >= 0) >= 0
    begins, first = reading.begins & within, reading.begins & ~within
    restart = bool(jumps.restarts.any())
    if restart and bool(((jumps.restarts & ~begins) | (begins & ~jumps.restarts & ~jumps.others)).any()):
        _check_agreed(str(reading.source), reading.begins, "position_ids", first | jumps.restarts)


def _check_longest(batch: Mapping[str, Any], reading: Reading) -> None:
    stated = {name: int(batch[name]) for name in LONGEST if batch.get(name) is not None}
    if not stated:
        return
    numbers = (reading.begins.flatten().cumsum(0) - 1)[(reading.numbers >= 0).flatten()]
    longest = int(numbers.bincount().max()) if len(numbers) else 0
    for name, length in stated.items():
        if length < longest:
            raise ValueError(f"{name} is {length}, but a document has {longest} tokens")
