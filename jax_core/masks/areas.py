"""How many query-key pairs of a mask are visible, counted by pieces of the sequence, on the host and without the pairs themselves.

Most masks show a query one interval of keys: causal masks, windows, chunks, packed documents, prefixes, images among causal text.
Those are counted exactly, in time linear in the sequence (:class:`Intervals`). Others are counted where they are sampled
(:class:`Grid`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_core.masks.static import Mask

SAMPLES = 4096  # positions on each side at which a mask function is evaluated, at least, if the sequence has as many
_ROWS = 2**20  # pairs evaluated at once


class Areas(Protocol):
    """Visible pairs of a sequence of ``length`` positions in pieces of ``piece`` positions."""

    def of_rows(self, piece: int) -> np.ndarray:
        """int64 ``[pieces]``: those of the queries in each piece."""

    def between(self, owner: np.ndarray, ranks: int, piece: int) -> np.ndarray:
        """int64 ``[ranks, ranks]``: those of one rank's queries and another's keys. ``owner [pieces]``: the rank of each."""


@dataclass(frozen=True)
class Intervals:
    """The query at position ``i`` sees the keys ``low[i] .. high[i] - 1``, none if ``high[i] <= low[i]``."""

    low: np.ndarray
    high: np.ndarray

    def of_rows(self, piece: int) -> np.ndarray:
        return np.maximum(self.high - self.low, 0).reshape(-1, piece).sum(1)

    def between(self, owner: np.ndarray, ranks: int, piece: int) -> np.ndarray:
        row = np.repeat(owner, piece)
        low = np.minimum(self.low, self.high)
        keys = _keys_below(row, self.high, ranks, piece, len(owner)) - _keys_below(row, low, ranks, piece, len(owner))
        return _by_owner(keys, owner, ranks)


def _keys_below(row: np.ndarray, end: np.ndarray, rows: int, piece: int, pieces: int) -> np.ndarray:
    """``[rows, pieces]``: how many pairs of a query of each row and a key in each piece have the key before the query's ``end``."""
    whole, rest = np.divmod(end, piece)
    at = row * (pieces + 1) + whole
    ended = np.bincount(at, minlength=rows * (pieces + 1)).reshape(rows, -1)
    part = np.bincount(at, rest, minlength=rows * (pieces + 1)).reshape(rows, -1).astype(np.int64)
    later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]  # ends in this piece or a later one
    return (later[:, 1:] * piece + part[:, :-1]).astype(np.int64)


def _by_owner(columns: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    """``[rows, pieces] -> [rows, ranks]``"""
    summed = np.zeros((ranks, len(columns)), np.int64)
    np.add.at(summed, owner, columns.T)
    return summed.T


@dataclass(frozen=True)
class Grid:
    """``pairs [n, n]``: the visible pairs of queries and keys of every two cells of ``cell`` positions."""

    pairs: np.ndarray
    cell: int

    def of_rows(self, piece: int) -> np.ndarray:
        return self.pairs.sum(1).reshape(-1, piece // self.cell).sum(1)

    def between(self, owner: np.ndarray, ranks: int, piece: int) -> np.ndarray:
        owner = np.repeat(owner, piece // self.cell)
        return _by_owner(_by_owner(self.pairs, owner, ranks).T, owner, ranks).T


def intervals(
    mask: Mask,
    length: int,
    documents: Sequence[int] | np.ndarray | None = None,
    prefix: Sequence[int] | int | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> Intervals:
    """Those of a sequence of ``length`` positions, with the arguments of :func:`jax_core.balance`, checked there."""
    position = np.arange(length, dtype=np.int64)
    start, stop = np.zeros(length, np.int64), np.full(length, length, np.int64)
    ends = np.array([0, length])
    if documents is not None:
        ends = np.concatenate([[0], np.cumsum(np.asarray(documents, np.int64))])
        number = np.searchsorted(ends, position, side="right") - 1
        padding = position >= ends[-1]
        start = np.where(padding, position, ends[np.minimum(number, len(ends) - 1)])
        stop = np.where(padding, position, ends[np.minimum(number + 1, len(ends) - 1)])
    low, high = start, stop
    if mask.causal:
        high = np.minimum(high, position + 1)
    if mask.left is not None:
        low = np.maximum(low, position - mask.left)
    if mask.right is not None:
        high = np.minimum(high, position + mask.right + 1)
    if mask.chunk is not None:
        low = np.maximum(low, position // mask.chunk * mask.chunk)
    if prefix is not None:
        lengths = np.broadcast_to(np.asarray(prefix, np.int64), len(ends) - 1)
        first = np.minimum(np.repeat(ends[:-1] + lengths, np.diff(ends)), np.repeat(ends[1:], np.diff(ends)))
        high[: ends[-1]] = np.maximum(high[: ends[-1]], first)
    for first, last in spans:
        high[first:last] = np.maximum(high[first:last], last)
    return Intervals(low, high)


def sampled(visible: Callable[[np.ndarray, np.ndarray], np.ndarray], known: Intervals, piece: int) -> Grid:
    """The pairs that ``visible(q_pos, k_pos)`` shows among those of ``known``, judged at equally spaced positions: at every one, if
    the sequence is no longer than ``SAMPLES``."""
    length = len(known.low)
    step = max(1, min(piece, 1 << max(0, (length // SAMPLES).bit_length() - 1)))
    while piece % step:
        step //= 2
    at = np.arange(step // 2, length, step)
    cells, each = length // piece, piece // step
    pairs = np.zeros((cells, cells), np.int64)
    rows = max(1, _ROWS // len(at) // each) * each
    for first in range(0, len(at), rows):
        q, k = at[first : first + rows, None], at[None]
        seen = np.broadcast_to(visible(q, k), (len(q), len(at))) & (known.low[q] <= k) & (k < known.high[q])
        pairs[first // each : (first + len(q)) // each] = seen.reshape(-1, each, cells, each).sum((1, 3))
    return Grid(pairs * step**2, piece)
