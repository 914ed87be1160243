"""Halo: the inputs just before each piece, from whichever rank holds them, and the way back of their cotangents."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_core.recurrence.pieces import Pieces, sent
from jax_core.strategies.transfers.transfer import numbered


class Round(NamedTuple):
    """What ranks send at once, at most one piece each. ``pairs`` of sender and receiver, none where each keeps its own; by rank,
    the place ``sent`` among the sender's pieces and ``received`` among the receiver's (the number of pieces of a rank: nothing
    is)."""

    pairs: tuple[tuple[int, int], ...]
    sent: np.ndarray
    received: np.ndarray

    @property
    def back(self) -> "Round":
        return Round(tuple((target, source) for source, target in self.pairs), self.received, self.sent)


def halo(x: Array, width: int, pieces: Pieces) -> Array:
    """Of ``x [pieces of a rank, batch, piece, ...]`` the ``width`` positions before each piece: ``[pieces of a rank, batch, width,
    ...]``, 0 before the sequence. They may reach over several short pieces. For each of its pieces but the last of the sequence a
    rank sends ``width`` positions, less what it keeps itself."""
    parts: list[Array] = [x[:, :, :0]]
    done: Array | None = None
    for hop, rows in _hops(width, pieces):
        arrived, done = _moved(x[:, :, pieces.piece - rows :], rounds(pieces, hop), pieces, done)
        parts.insert(0, arrived)
    return jnp.concatenate(parts, axis=2)


def halo_back(cotangent: Array, pieces: Pieces) -> Array:
    """The transpose of :func:`halo`: the cotangent of ``x``, for that of the halo. As much is sent as there."""
    width = end = cotangent.shape[2]
    total = jnp.zeros((*cotangent.shape[:2], pieces.piece, *cotangent.shape[3:]), cotangent.dtype)
    done: Array | None = cotangent
    for hop, rows in _hops(width, pieces):
        back = [each.back for each in rounds(pieces, hop)]
        arrived, done = _moved(cotangent[:, :, end - rows : end], back, pieces, done)
        total, end = total.at[:, :, pieces.piece - rows :].add(arrived), end - rows
    return total


def _hops(width: int, pieces: Pieces) -> Iterator[tuple[int, int]]:
    """How many pieces back, and how many positions of that piece."""
    for hop, start in enumerate(range(0, width, pieces.piece), 1):
        yield hop, min(pieces.piece, width - start)


def _moved(x: Array, rounds: list[Round], pieces: Pieces, done: Array | None) -> tuple[Array, Array | None]:
    """What arrives of ``x [pieces of a rank, ...]`` by the rounds; and the last that did, after which the next may be sent."""
    rank, arrived = pieces.rank, jnp.zeros_like(x)
    for each in rounds:
        moved = jnp.take(x, jnp.asarray(each.sent)[rank], axis=0, mode="fill", fill_value=0)
        if each.pairs:
            axes, places = numbered(pieces.axis_name, pieces.size)
            pairs = [(places[source], places[target]) for source, target in each.pairs]
            done = moved = sent(partial(lax.ppermute, axis_name=axes, perm=pairs), moved, done)
        arrived = arrived.at[jnp.asarray(each.received)[rank]].add(moved, mode="drop")
    return arrived, done


def rounds(pieces: Pieces, hop: int) -> list[Round]:
    """Who sends which piece to whom, so that each piece gets the one ``hop`` before it: what ranks keep, then what they send."""
    place = {int(number): (rank, slot) for (rank, slot), number in np.ndenumerate(pieces.table)}
    moves = [(*place[number - hop], *place[number]) for number in sorted(place) if number >= hop]
    local, sent = ([move for move in moves if (move[0] != move[2]) == remote] for remote in (False, True))
    return [_round(each, pieces) for group in (local, sent) for each in _apart(group)]


def _apart(moves: list[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """The moves in groups, in none of which a rank sends or receives twice: each is in the first in which both are free."""
    while moves:
        chosen: list[tuple[int, int, int, int]] = []
        for move in moves:
            if all(move[0] != other[0] and move[2] != other[2] for other in chosen):
                chosen.append(move)
        yield chosen
        moves = [move for move in moves if move not in chosen]


def _round(moves: list[tuple[int, int, int, int]], pieces: Pieces) -> Round:
    ranks, none = pieces.table.shape
    sent, received = np.full(ranks, none), np.full(ranks, none)
    for source, out, target, into in moves:
        sent[source], received[target] = out, into
    return Round(tuple((source, target) for source, _, target, _ in moves if source != target), sent, received)
