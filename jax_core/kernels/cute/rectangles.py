"""Which rows of a pair of shards a call covers.

In a causal ring the pair of a rank's queries and another rank's keys is one rectangle of scores: the last rows of the queries (all,
half or none) and the first of the keys. Which, only the device knows; flash-attn-4 reads it there, as the offsets and lengths of
packed sequences, so that nothing is sliced, copied or computed in vain.

The layout decides which:

- contiguous: keys of a lower rank are seen by all queries, those of a higher one by none;
- zigzag: keys of a lower rank are seen by all queries, but of these keys only the early half; those of a higher one, both halves,
  by the late half of the queries.

Documents cut these further. A document is one interval of a shard's rows, so on the diagonal each is a sequence of its own. Of two
ranks' shards at most one document has rows in both that see each other: the one that covers all that is between them. If documents
are placed by a table, several have, each with one rectangle.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import Pair, Runs, Scores
from jax_core.masks.placement import Pieces, pieces_of, shared_part
from jax_core.masks.static import Mask
from jax_core.operands import MOST_SHARED, is_placed

# Offsets and lengths of queries, offsets and lengths of keys.
Offsets = tuple[Array | None, Array | None, Array | None, Array | None]
WHOLE: Offsets = (None, None, None, None)
_PIECE = 4096  # rows of padding that may attend to one another: what that costs is lost


class Rectangle(NamedTuple):
    """Query rows from ``q_first`` on, to ``q_end`` (None: all that follow), key rows ``k_first`` up to ``k_end``: numbers on the
    device, or one for each batch entry."""

    q_first: int | Array
    k_end: int | Array
    k_first: int | Array = 0
    q_end: int | Array | None = None


def rectangle(pair: Pair) -> Rectangle:
    """Of two different ranks' shards in a causal ring."""
    before, q_length, k_length = pair.k_runs[0].start < pair.q_runs[0].start, pair.q.shape[1], pair.k.shape[1]
    if len(pair.q_runs) == 1:
        return Rectangle(jnp.where(before, 0, q_length), jnp.where(before, k_length, 0))
    return Rectangle(jnp.where(before, 0, q_length // 2), jnp.where(before, k_length // 2, k_length))


def is_within(mask: Mask) -> bool:
    """Do the keys include the queries' own positions, so that flash-attn-4's masks, aligned to the last query and the last key, are
    right for the keys up to the last query?"""
    return mask.keys is not None and mask.causal and mask.chunk is None and not mask.any_position


def within(pair: Pair) -> Rectangle:
    """All queries, and of the keys those that exist, up to the last query's own."""
    (q_run,), (k_run,) = pair.q_runs, pair.k_runs
    first, end = (jnp.clip(at - k_run.start, 0, k_run.length) for at in (0, q_run.start + q_run.length))
    return Rectangle(jnp.int32(0), end, first)


def where_of(area: Rectangle, pair: Pair) -> Offsets:
    """As flash-attn-4 reads it, for operands whose batch entries follow one another: ``[batch * length, heads, dim]``."""
    batch, q_length, k_length = *pair.q.shape[:2], pair.k.shape[1]
    q_end = q_length if area.q_end is None else area.q_end
    return *_rows(area.q_first, q_end, batch, q_length), *_rows(area.k_first, area.k_end, batch, k_length)


def _rows(first: int | Array, end: int | Array, batch: int, length: int) -> tuple[Array, Array | None]:
    """Offsets of one sequence in each batch entry; and their lengths, where they do not follow from those."""
    first, end = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), batch) for x in (first, end))
    if batch == 1:
        return jnp.concatenate([first, end]), None
    offsets = jnp.arange(batch, dtype=jnp.int32) * length + first
    return jnp.append(offsets, jnp.int32(batch * length)), end - first


def squares(pair: Pair, padding: bool) -> Offsets:
    """Each document's rows of a shard, as sequences; with ``padding`` also the rows of none, in pieces."""
    bounds, (batch, length) = bounds_of(pair), pair.q.shape[:2]
    if padding:
        further = bounds[:, -1:] + _PIECE * jnp.arange(1, -(-length // _PIECE) + 1, dtype=jnp.int32)
        bounds = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), bounds, jnp.minimum(further, length)], axis=1)
    elif batch == 1:
        return bounds[0], None, bounds[0], None
    starts = bounds[:, :-1] + length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    offsets = jnp.append(starts.reshape(-1), jnp.int32(batch * length))
    lengths = None if padding else jnp.diff(bounds).reshape(-1)
    return offsets, lengths, offsets, lengths


def bounds_of(pair: Pair) -> Array:
    """``[batch, documents + 1]``: the rows at which documents begin in the shard of queries, and at which the last one ends."""
    if is_placed(pair.extras.documents):
        return _pieces(pair, pair.q_runs).documents[None]
    return _rows_before(_positions(pair), pair.q_runs)


def _pieces(pair: Pair, runs: Runs) -> Pieces:
    """Of the rank whose shard this is, contiguous or zigzag."""
    assert pair.extras.documents is not None
    return pieces_of(pair.extras.documents, runs[0].start // runs[0].length)


def of_shared_documents(pair: Pair) -> tuple[Offsets, Array, Array]:
    """Of two ranks' parts of placed documents: a sequence for each that both may have. Also the rows of queries and of keys, bool
    ``[1, length]``."""
    queries, keys = (shared_part(_pieces(pair, runs), MOST_SHARED) for runs in (pair.q_runs, pair.k_runs))
    before = keys.distances < queries.distances
    q_first, k_end = jnp.where(before, queries.begins, queries.middles), jnp.where(before, keys.middles, keys.ends)
    there = (q_first < queries.ends) & (keys.begins < k_end)
    sides = (q_first, queries.ends, pair.q.shape[1]), (keys.begins, k_end, pair.k.shape[1])
    # Of what is not there the keys may have been left behind.
    offsets = [jnp.append(jnp.where(there, first, jnp.minimum(end, length)), jnp.int32(length)) for first, end, length in sides]
    lengths = [jnp.where(there, end - first, 0) for first, end, _ in sides]
    q_rows, k_rows = (_within(at[:-1], number, length) for at, number, (*_, length) in zip(offsets, lengths, sides, strict=True))
    return (offsets[0], lengths[0], offsets[1], lengths[1]), q_rows, k_rows


def _within(first: Array, lengths: Array, length: int) -> Array:
    rows = jnp.arange(length, dtype=jnp.int32)[:, None]
    return ((rows >= first) & (rows < first + lengths)).any(1)[None]


def _positions(pair: Pair) -> Array:
    """The same in the whole sequence."""
    assert pair.extras.documents is not None
    return jnp.broadcast_to(pair.extras.documents, (pair.q.shape[0], pair.extras.documents.shape[1]))


def _rows_before(positions: Array, runs: Runs) -> Array:
    """How many rows of a shard are before each of these positions."""
    return sum((jnp.clip(positions - run.start, 0, run.length) for run in runs), jnp.zeros_like(positions))


def of_one_document(pair: Pair) -> Rectangle:
    """What is left of a causal ring's rectangle (:func:`rectangle`): of each batch entry the rows of the document that the first of
    its query rows is in."""
    whole, runs, bounds = rectangle(pair), pair.q_runs, _positions(pair)
    first = runs[0].start if len(runs) == 1 else jnp.where(whole.q_first == 0, runs[0].start, runs[1].start)
    number = (bounds <= first).sum(1, dtype=jnp.int32) - 1  # of the document; before the first and after the last there is none
    start, end = (_at(bounds, number + step) for step in (0, 1))
    k_first, q_end = _rows_before(start, pair.k_runs), _rows_before(end, runs)
    there = (number >= 0) & (number < bounds.shape[1] - 1) & (k_first < whole.k_end) & (q_end > whole.q_first)
    return Rectangle(whole.q_first, whole.k_end, jnp.where(there, k_first, whole.k_end), jnp.where(there, q_end, whole.q_first))


def _at(table: Array, columns: Array) -> Array:
    """One column of each row; of those beside the table the nearest."""
    columns = jnp.clip(columns, 0, table.shape[1] - 1)
    return jnp.take_along_axis(table, columns[:, None], axis=1)[:, 0]


def offsets(batch: int, length: int) -> Array:
    """Those of whole batch entries."""
    return jnp.arange(batch + 1, dtype=jnp.int32) * length


def between(first: int | Array, end: int | Array, length: int) -> Array:
    """bool ``[batch|1, length]``: the rows from ``first`` up to ``end``, numbers or one for each batch entry."""
    first, end = (jnp.reshape(jnp.asarray(x, jnp.int32), (-1, 1)) for x in (first, end))
    rows = jnp.arange(length, dtype=jnp.int32)
    return (rows >= first) & (rows < end)


def in_tiles(offsets: Array, lengths: Array, rows: int, tile: int) -> tuple[Array, Array]:
    """Where flash-attn-4 has the rows of several sequences that each begin with a tile: for each of its places the row that is
    there, and whether there is one. ``offsets`` of sequences among ``rows``, in front of all further ones."""
    number = lengths.shape[0]
    numbers = jnp.arange(number, dtype=jnp.int32)
    begins = (offsets[:number] + numbers * tile) // tile * tile
    places = jnp.arange((rows + (number + 1) * tile - 1) // tile * tile, dtype=jnp.int32)
    at = (begins <= places[:, None]).sum(1, dtype=jnp.int32) - 1  # which sequence; -1 before the first
    within = places - begins[at]
    there = (at >= 0) & (within < lengths[at])
    return jnp.where(there, offsets[at] + within, 0), there


def is_static(runs: Runs) -> bool:
    """Is this the only shard of its sequence? (Then its position is a number, otherwise a value on the device.)"""
    return isinstance(runs[0].start, int)


def needs_lists(scores: Scores, has_data: bool, alone: bool, same_length: bool, scattered: bool) -> bool:
    """Can flash-attn-4 not compute this by its causal mask, its windows and rectangles alone? ``alone``: no ring. ``scattered``:
    a shard is more than two runs."""
    mask = scores.mask
    if scattered and mask != Mask():
        return True
    if has_data or scores.predicates or mask.chunk is not None or mask.any_position:
        return True
    if is_within(mask):
        return False
    windowed = mask.left is not None or mask.right is not None
    return (windowed and not alone) or ((windowed or mask.causal) and not same_length)


def packs(pair: Pair, listed: bool) -> bool:
    """Are all pairs of this pass packed, and so the sums of its gradients? With one batch entry there is no difference."""
    return pair.q.shape[0] > 1 and pair.scores.mask.causal and not listed and not is_static(pair.q_runs)
