"""Which rank holds which tokens of a packed batch, so that all have as many tokens and as much causal attention to compute.

A document that one rank can take whole stays whole: its blocks are dense, and no other rank's keys concern it. Only documents too
long for that are cut over all ranks, each in zigzag, which costs every rank the same at every step of the ring.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

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
    """``pieces``: those of each rank, in the order of its shard. ``numbers``: the segment id of every document: documents that one
    rank holds alone have consecutive ids, so that blocks of different ranks have none in common."""

    pieces: tuple[tuple[Piece, ...], ...]
    numbers: np.ndarray

    @property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean."""
        work = [sum(piece.work for piece in held) for held in self.pieces]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0


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
    for piece in left:  # what did not fit goes where there is room
        while piece.stop > piece.start:
            piece = max(ranks, key=lambda rank: rank.free).take(piece)
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
