"""``balance``: which pieces of a sequence each rank holds, so that all have as much to compute under a given mask."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jax_core.masks.areas import Areas, Grid, intervals, sampled
from jax_core.masks.plan import FEWEST, Plan
from jax_core.masks.static import Mask, Window, is_integer, make_mask

TOLERANCE = 0.05
_PIECES = tuple(2**power for power in range(10, -1, -1))  # what is tried, longest first
_SHORTEST = 128  # shorter pieces, which kernels fill up, are for sequences that have too few of this length
_PADDING = 1 / 64  # of the sequence, at most, for a piece longer than the shortest


def balance(
    length: int,
    ranks: int,
    *,
    causal: bool = False,
    sliding_window: Window = None,
    chunk_size: int | None = None,
    documents: Sequence[int] | Literal["unknown"] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    prefix: Sequence[int] | int | None = None,
    spans: Sequence[tuple[int, int]] = (),
    mask_mod: Callable[..., np.ndarray] | None = None,
    areas: ArrayLike | None = None,
    piece: int | None = None,
    steps: bool = True,
    tolerance: float = TOLERANCE,
) -> Plan:
    """A layout (``layout=plan``) under which ``ranks`` ranks have equally long shards and nearly equal work under a mask.

    The sequence is cut into pieces. A piece's work is the number of visible query-key pairs of its queries, counted exactly. If the
    contiguous or zigzag order of the pieces is even enough, the plan is that. Otherwise they are dealt in rounds, one to each rank,
    the largest to the rank with the least so far (Graham 1969, "Bounds on multiprocessing timing anomalies"), and exchanged. This
    is done on the host, with NumPy alone. The idea of planning by areas is MagiAttention's (SandAI 2025).

    In a ring, ranks wait for each other at every step. ``plan.ring_imbalance`` counts that, ``plan.imbalance`` only the sum over
    the whole pass, which is what counts where a rank has one launch (``strategy="all_gather"``; ``steps=False`` here). A plan
    spreads every document over all ranks, so all steps of a ring send, as in zigzag.

    Args:
        length: of the sequence, in positions. The plan's own length is a multiple of ``ranks * piece``: pad to it
            (:func:`ring_attn.pad`, ``shard_batch``).
        ranks: of the ring.
        causal, sliding_window, chunk_size: as for :func:`ring_attention`, by positions in the whole sequence.
        documents: lengths of packed documents, in order, which do not see each other; what follows the last is padding, and sees
            nothing. Or ``cu_seqlens``: where they end, from 0 on. A plan is part of a compiled program, so for documents that
            change from batch to batch there is "unknown": ranks take turns, piece by piece, of 128 positions if ``piece`` is None.
            No areas are counted then, and the plan's imbalance is None.
        prefix: how many positions at the start of the sequence, or of each document, all its queries see (prefix language models):
            one number, or one for each document.
        spans: pairs ``(start, stop)`` of positions that all see each other (images), each within a document.
        mask_mod: ``(batch, head, q_pos, k_pos) -> bool``, as for :func:`ring_attention`, if it also takes NumPy arrays of positions
            (it gets 0 for the first two); what it hides is hidden besides. It is evaluated at about 4096 positions of either side,
            equally spaced: exact up to that length, an estimate beyond.
        areas: instead of all these, visible pairs ``[n, n]`` of ``n`` equal parts of queries and of keys, or booleans.
        piece: positions in a piece. None: the longest power of two from 1024 to 128 that reaches ``tolerance``, or a shorter one
            where the sequence has no three such pieces for each rank.
        steps: whether the steps of a ring are to be even (``plan.ring_imbalance``), or only their sum (``plan.imbalance``).
        tolerance: what is even enough. If no plan is, the result is the most even one; print it to see.

    Raises ValueError for numbers that are out of range or contradict each other, and for documents longer than the sequence.
    """
    for name, number in (("length", length), ("ranks", ranks), ("piece", 1 if piece is None else piece)):
        if not is_integer(number) or number < 1:
            raise ValueError(f"{name} must be a positive int, got {number!r}")
    if isinstance(documents, str):
        return _in_turns(length, ranks, piece, documents, (cu_seqlens, prefix, tuple(spans), mask_mod, areas))
    mask_spec = _MaskSpec(
        make_mask(causal, sliding_window, chunk_size), _documents(documents, cu_seqlens), prefix, tuple(spans), mask_mod
    )
    if areas is None:
        mask_spec.check(length)
        tries: Iterator[tuple[Areas, int]] = (
            (mask_spec.areas(_padded(length, ranks, one), one), one) for one in _pieces(length, ranks, piece)
        )
    else:
        grid = _grid(length, ranks, areas, mask_spec, piece)
        tries = iter([(grid, grid.cell)])
    return _first_even(tries, ranks, tolerance, "ring_imbalance" if steps else "imbalance")


def _in_turns(length: int, ranks: int, piece: int | None, documents: str, others: tuple) -> Plan:
    if documents != "unknown" or others != (None, None, (), None, None):
        raise ValueError(
            f'documents must be lengths, None, or "unknown" without cu_seqlens, prefix, spans, mask_mod, areas; got {documents!r}'
        )
    piece = _pieces(length, ranks, piece)[-1]
    pieces = _padded(length, ranks, piece) // piece
    return Plan(piece, tuple(tuple(range(rank, pieces, ranks)) for rank in range(ranks)))


def _first_even(tries: Iterator[tuple[Areas, int]], ranks: int, tolerance: float, measure: str) -> Plan:
    """The first that is even enough; or else of those that are over a whole pass (of all, if none is) the most even one."""
    best, key = None, (True, math.inf)
    for areas, piece in tries:
        work = areas.of_rows(piece)
        for owner in _owners(work, ranks):
            load = np.bincount(owner, work, ranks)
            uneven = load.max() > (1 + tolerance) * load.mean()
            if best is not None and uneven > key[0]:
                continue
            plan = _plan(areas, owner, ranks, piece)
            measured = uneven, getattr(plan, "imbalance" if uneven else measure)
            if measured <= (False, tolerance):
                return plan
            best, key = (plan, measured) if measured < key or best is None else (best, key)
    assert best is not None
    return best


@dataclass(frozen=True)
class _MaskSpec:
    """The mask as it was given."""

    mask: Mask
    documents: np.ndarray | None  # lengths
    prefix: Sequence[int] | int | None
    spans: tuple[tuple[int, int], ...]
    mask_mod: Callable[..., np.ndarray] | None

    def areas(self, length: int, piece: int) -> Areas:
        known = intervals(self.mask, length, self.documents, self.prefix, self.spans)
        return known if self.mask_mod is None else sampled(partial(self.mask_mod, 0, 0), known, piece)

    def check(self, length: int) -> None:
        documents = np.array([length]) if self.documents is None else self.documents
        if documents.ndim != 1 or (documents < 0).any() or documents.sum() > length:
            raise ValueError(f"documents must be lengths >= 0 whose sum is at most {length}, got a sum of {documents.sum()}")
        if (self.prefix is not None or self.spans) and self.mask != Mask(causal=True):
            raise ValueError(
                "prefix and spans need causal=True, without sliding_window and chunk_size; give other masks as mask_mod"
            )
        if self.prefix is not None and np.size(self.prefix) not in (1, len(documents)):
            raise ValueError(f"prefix must be one int, or one for each of {len(documents)} documents; got {np.size(self.prefix)}")
        if self.prefix is not None and np.min(self.prefix) < 0:
            raise ValueError(f"prefix must not be negative, got {np.min(self.prefix)}")
        starts = np.cumsum(documents)
        for start, stop in self.spans:
            if not 0 <= start < stop <= starts[-1] or ((start < starts) & (starts < stop)).any():
                raise ValueError(f"spans must be pairs (start, stop) within one document each, got {(start, stop)}")


def _documents(lengths: Sequence[int] | None, ends: Sequence[int] | None) -> np.ndarray | None:
    if lengths is not None and ends is not None:
        raise ValueError("give the documents once: documents (their lengths) or cu_seqlens (where they end); got both")
    if ends is None:
        return None if lengths is None else np.asarray(lengths, np.int64)
    places = np.asarray(ends, np.int64)
    if places.ndim != 1 or not len(places) or places[0] != 0:
        raise ValueError(f"cu_seqlens must be [documents + 1] and begin with 0, got {places.tolist()[:10]}")
    return np.diff(places)


def _grid(length: int, ranks: int, areas: ArrayLike, mask_spec: _MaskSpec, piece: int | None) -> Grid:
    if mask_spec != _MaskSpec(Mask(), None, None, (), None):
        raise ValueError("areas says all there is to know of the mask; give no causal, window, documents or others beside it")
    pairs = np.asarray(areas)
    count = len(pairs) if pairs.ndim else 0
    if pairs.shape != (count, count) or not count or length % count or (pairs < 0).any():
        raise ValueError(f"areas must be [n, n], not negative, with n a divisor of the length {length}; got shape {pairs.shape}")
    if piece not in (None, length // count):
        raise ValueError(f"areas of {count} parts have pieces of {length // count} positions, got piece={piece}; leave it out")
    if count % ranks or (ranks > 1 and count < FEWEST * ranks):
        raise ValueError(f"areas must have a multiple of {ranks} parts, at least {FEWEST} for each rank; got {count}")
    return Grid(pairs.astype(np.int64), length // count)


def _padded(length: int, ranks: int, piece: int) -> int:
    """The length of a plan in such pieces."""
    each = max(-(-length // (ranks * piece)), 1 if ranks == 1 else FEWEST)
    return each * ranks * piece


def _pieces(length: int, ranks: int, piece: int | None) -> list[int]:
    """The lengths of pieces to try."""
    if piece is not None:
        return [piece]
    fitting = [one for one in _PIECES if length >= FEWEST * ranks * one]
    good = [one for one in fitting if one <= _SHORTEST or _padded(length, ranks, one) - length <= _PADDING * length]
    long = [one for one in good if one >= _SHORTEST]
    return long or good or [1]


def _owners(work: np.ndarray, ranks: int) -> Iterator[np.ndarray]:
    """``[pieces]``, the rank of each: those first whose ranks hold neighbouring pieces.

    Where ranks take turns among neighbouring pieces, each has a part of every long document, and so the steps of a ring are even.
    """
    count = np.arange(len(work))
    each = len(work) // ranks
    yield count // each
    if each % 2 == 0:
        half = count // (each // 2)
        yield np.minimum(half, 2 * ranks - 1 - half)
    yield count % ranks
    in_turns = _dealt(work, ranks, count)
    yield in_turns
    yield _exchanged(work, count % ranks, ranks)
    yield _exchanged(work, in_turns, ranks)
    yield _exchanged(work, _dealt(work, ranks, np.argsort(-work, kind="stable")), ranks)


def _plan(areas: Areas, owner: np.ndarray, ranks: int, piece: int) -> Plan:
    table = np.argsort(owner, kind="stable").reshape(ranks, -1)
    between = areas.between(owner, ranks, piece)
    rank, step = np.ogrid[:ranks, :ranks]
    steps = between[rank, (rank - step) % ranks]
    return Plan(
        piece, tuple(map(tuple, table.tolist())), areas=tuple(between.sum(1).tolist()), steps=tuple(map(tuple, steps.tolist()))
    )


def _dealt(work: np.ndarray, ranks: int, order: np.ndarray) -> np.ndarray:
    """The rank of each piece if in every round the next pieces in ``order`` go to a rank each, the largest to the rank with the
    least work."""
    owner, load = np.empty(len(work), np.int64), np.zeros(ranks, np.int64)
    for pieces in order.reshape(-1, ranks):
        largest_first, least_first = np.argsort(-work[pieces], kind="stable"), np.argsort(load, kind="stable")
        owner[pieces[largest_first]] = least_first
        load[least_first] += work[pieces[largest_first]]
    return owner


def _exchanged(work: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    """After exchanges of two pieces between the rank with the most work and another, as long as these two become more even."""
    owner, load = owner.copy(), np.bincount(owner, work, ranks)
    for _ in range(len(work)):
        most = load.argmax()
        mine, others = np.flatnonzero(owner == most), np.flatnonzero(owner != most)
        moved = work[mine][:, None] - work[others]
        larger = np.maximum(load[most] - moved, load[owner[others]] + moved)
        at = larger.argmin()
        if larger.flat[at] >= load[most]:
            break
        one, other = mine[at // len(others)], others[at % len(others)]
        load[most] -= moved.flat[at]
        load[owner[other]] += moved.flat[at]
        owner[one], owner[other] = owner[other], most
    return owner
