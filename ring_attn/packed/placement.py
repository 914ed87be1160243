"""Which rank holds which tokens of a packed batch, so that all have as many tokens and as much causal attention to compute.

A document that one rank can take whole stays whole: its blocks are dense, and no other rank's keys concern it. Only documents too
long for that are cut over all ranks, each in zigzag, which costs every rank the same at every step of the ring.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np

from jax_core.operands import EIGHTHS, MOST_DOCUMENTS, MOST_SHARED, NOBODY
from ring_attn.documents.table import places

_SHARED = (0, 3, 6, EIGHTHS)
TOLERANCE = 1.05  # of the largest work of a rank over the mean: what is worth cutting one more document


class Piece(NamedTuple):
    """Positions ``start`` to ``stop`` of a document."""

    document: int
    start: int
    stop: int

    @property
    def work(self) -> int:
        """How many keys its queries see."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2


class Placement(NamedTuple):
    """``pieces``: those of each rank, in the order of its shard. ``numbers``: the segment id of every document: those that several
    ranks have a part of come first; documents that one rank holds alone have consecutive ids, so that blocks of different ranks
    have none in common."""

    pieces: tuple[tuple[Piece, ...], ...]
    numbers: np.ndarray

    @property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean."""
        work = [sum(piece.work for piece in pieces) for pieces in self.pieces]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def table(self) -> np.ndarray | None:
        """As kernels take it (``jax_core.masks.placement``), int32 ``[ranks, most, 3]``; None where they cannot."""
        shared = 1 + max((self.numbers[piece.document] for piece in self._shared()), default=-1)
        most = places(max(map(len, self.pieces)))
        if shared > MOST_SHARED or most > MOST_DOCUMENTS or not self._makes_rectangles():
            return None
        table = np.zeros((len(self.pieces), most, 3), np.int32)
        table[:, :, 0] = NOBODY
        for rows, pieces in zip(table, self.pieces, strict=True):
            rows[: len(pieces)] = [(self.numbers[piece.document], piece.start, piece.stop - piece.start) for piece in pieces] or 0
        return table

    def shared_eighths(self, shard_length: int) -> int:
        """Of a shard, its first rows, how many hold all of the documents that several ranks have a part of: one of few numbers, for
        each is a program of its own."""
        shared, rows = {piece.document for piece in self._shared()}, 0
        for local_pieces in self.pieces:
            ends = accumulate(piece.stop - piece.start for piece in local_pieces)
            rows = max(rows, *(end for end, piece in zip(ends, local_pieces, strict=True) if piece.document in shared), 0)
        return next(eighths for eighths in _SHARED if rows * EIGHTHS <= eighths * shard_length)

    def order(self, lengths: Sequence[int], shard_length: int) -> np.ndarray:
        """``[ranks * shard_length]``: which token of the documents, one after another, is where, -1 for padding."""
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        order = np.full((len(self.pieces), shard_length), -1)
        for shard, pieces in zip(order, self.pieces, strict=True):
            parts = [np.arange(starts[piece.document] + piece.start, starts[piece.document] + piece.stop) for piece in pieces]
            tokens = np.concatenate([np.empty(0, np.int64), *parts])
            shard[: len(tokens)] = tokens
        return order.reshape(-1)

    def _shared(self) -> Iterator[Piece]:
        """Pieces of documents that several ranks have a part of."""
        ranks = Counter(document for local_pieces in self.pieces for document in {piece.document for piece in local_pieces})
        return (piece for local_pieces in self.pieces for piece in local_pieces if ranks[piece.document] > 1)

    def _makes_rectangles(self) -> bool:
        starts: dict[int, list[list[int]]] = defaultdict(list)
        for pieces_of_rank in self.pieces:
            for document, pieces in groupby(pieces_of_rank, key=lambda piece: piece.document):
                starts[document].append([piece.start for piece in pieces])
        return all(map(_are_nested, starts.values()))


def _are_nested(parts: list[list[int]]) -> bool:
    """Whether a second piece of a rank is after all that ranks have whose first piece is after its own: the starts of each rank's
    pieces."""
    last = -1
    for part in sorted(parts, reverse=True):
        if len(part) > 2 or (len(part) == 2 and part[1] < last):
            return False
        last = max(last, part[-1])
    return True


def place(lengths: Sequence[int], size: int, shard_length: int) -> Placement:
    """Places documents of these lengths on ``size`` ranks of ``shard_length`` tokens each. The same on every rank: it depends on
    nothing else."""
    assert sum(lengths) <= size * shard_length
    longest_first = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    tries = (_place(lengths, longest_first, cut, size, shard_length) for cut in _numbers_to_cut(lengths, size))
    best = next(tries)
    for other in tries:
        if best.imbalance <= TOLERANCE:
            break
        best = min(best, other, key=lambda placement: placement.imbalance)
    return best


def _numbers_to_cut(lengths: Sequence[int], size: int) -> Iterator[int]:
    """How many of the longest documents to cut over all ranks: first those that alone are more than a rank's share of the work."""
    if size == 1:
        yield 0
        return
    work = [Piece(0, 0, length).work for length in lengths]
    share = TOLERANCE * sum(work) / size
    cut, step = sum(one > share for one in work), 1
    while cut < len(lengths):
        yield cut
        cut, step = cut + step, 2 * step
    yield len(lengths)


def _place(lengths: Sequence[int], longest_first: list[int], cut: int, size: int, shard_length: int) -> Placement:
    ranks = [_Rank(shard_length) for _ in range(size)]
    home = np.full(len(lengths), -1)
    left = []
    for document in longest_first[:cut]:
        for rank, piece in _zigzag(document, lengths[document], size):
            left.append(ranks[rank].take(piece))
    for document in longest_first[cut:]:
        whole = Piece(document, 0, lengths[document])
        roomy = [rank for rank in range(size) if ranks[rank].free >= lengths[document]]
        home[document] = min(roomy or range(size), key=lambda rank: (ranks[rank].work, rank) if roomy else -ranks[rank].free)
        left.append(ranks[home[document]].take(whole))
    split = {piece.document for piece in left if piece.stop > piece.start}
    for piece in left:  # what did not fit goes where there is room
        while piece.stop > piece.start:
            piece = max(ranks, key=lambda rank: rank.free).take(piece)
    for document in split:
        home[document] = -1
    numbers = np.empty(len(lengths), np.int64)
    numbers[np.lexsort((np.arange(len(lengths)), home))] = np.arange(len(lengths))
    order = [sorted(rank.pieces, key=lambda piece: (numbers[piece.document], piece.start)) for rank in ranks]
    return Placement(tuple(map(tuple, order)), numbers)


class _Rank:
    """What one rank holds so far."""

    def __init__(self, free: int) -> None:
        self.free, self.work, self.pieces = free, 0, list[Piece]()

    def take(self, piece: Piece) -> Piece:
        """Takes as much of the piece as fits, and returns the rest."""
        middle = min(piece.stop, piece.start + self.free)
        taken = piece._replace(stop=middle)
        if middle > piece.start:
            self.pieces.append(taken)
        self.free -= middle - piece.start
        self.work += taken.work
        return piece._replace(start=middle)


def _zigzag(document: int, length: int, size: int) -> Iterator[tuple[int, Piece]]:
    """The document in ``2 * size`` chunks, two for each rank: one from each end."""
    ends = [length * chunk // (2 * size) for chunk in range(2 * size + 1)]
    for chunk, (start, stop) in enumerate(pairwise(ends)):
        yield min(chunk, 2 * size - 1 - chunk), Piece(document, start, stop)
