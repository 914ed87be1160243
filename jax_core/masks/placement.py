"""Documents that lie in a ring by a table, not by a layout: which rows of which rank's shard are which tokens of a document.

The table is data, the same on all ranks: int32 ``[ranks, most, 3]``, of each rank its pieces in the order of its rows, each the
number of its document, the first token's distance from the document's start, and how many tokens; then pieces of no tokens, of
number ``operands.NOBODY``. Rows after the last piece are padding. Numbers ascend; those of documents that several ranks have a part
of come first, from 0 on, ``operands.MOST_SHARED`` of them at most. A rank has one piece of a document, or two, of which the later
one follows in the next rows.

Of two ranks' parts of a document exactly one rectangle of scores must be causally visible, as in zigzag: where the first token of
the keys comes before that of the queries, all queries see the keys' first piece; otherwise the queries' second piece, if there is
one, sees all keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Pieces(NamedTuple):
    """Of one rank, int32 ``[most]``: numbers of documents, distances from their starts, and the rows at which pieces begin and
    end."""

    numbers: Array
    distances: Array
    begins: Array
    ends: Array

    @property
    def documents(self) -> Array:
        """int32 ``[most + 1]``: the rows at which documents begin, and the last one ends. (A second piece begins none.)"""
        first = jnp.concatenate([jnp.ones(1, bool), self.numbers[1:] != self.numbers[:-1]])
        return jnp.append(jnp.where(first, self.begins, self.ends), self.ends[-1])

    def ids(self, length: int) -> tuple[Array, Array]:
        """int32 ``[1, length]``: the number of each row's document, -1 on padding, and the distance from its start."""
        rows = jnp.arange(length, dtype=jnp.int32)
        piece = jnp.searchsorted(self.ends, rows, side="right").clip(0, len(self.ends) - 1)
        real = rows < self.ends[-1]
        distances = self.distances[piece] + rows - self.begins[piece]
        return jnp.where(real, self.numbers[piece], -1)[None], jnp.where(real, distances, 0)[None]


class Shared(NamedTuple):
    """Of the first documents, int32 ``[documents]``: the rows at which a rank's part begins, its second piece does, and it ends
    (the same where there is none); and the first token's distance from the document's start."""

    begins: Array
    middles: Array
    ends: Array
    distances: Array


def pieces_of(table: Array, rank: int | Array) -> Pieces:
    numbers, distances, tokens = jnp.moveaxis(table[rank], -1, 0)
    ends = jnp.cumsum(tokens, dtype=jnp.int32)
    return Pieces(numbers, distances, ends - tokens, ends)


def shared_part(pieces: Pieces, most: int) -> Shared:
    documents = jnp.arange(most, dtype=jnp.int32)
    first, after = (jnp.searchsorted(pieces.numbers, documents, side=side) for side in ("left", "right"))
    begins, distances = jnp.append(pieces.begins, pieces.ends[-1]), jnp.append(pieces.distances, 0)
    return Shared(begins[first], begins[jnp.minimum(first + 1, after)], begins[after], distances[first])
