"""Where documents begin, by the ids of a shard's tokens: negative ids are padding, and a document is a stretch of equal ids,
whatever padding is before, after or within it. And what comes before each piece for a convolution of documents: the last inputs
that are none of padding, wherever they are.

Padding may be as long as it likes, so these are not in the piece before. The last inputs of every piece, its tail, go to all ranks,
and each puts them one after another, behind the state that enters the sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.pieces import Pieces
from jax_core.varying import vary, varying_axes


def resets(ids: Array, pieces: Pieces) -> Array:
    """bool ``[pieces of a rank, batch, piece]``: the first token of each document but the first of the sequence, which a state that
    is given enters. ``ids [batch, length]``. Each rank sends the last id of each of its pieces to all others."""
    ids = pieces.split(ids)
    ends = jnp.moveaxis(pieces.gather(_last(ids)[..., -1]), 0, -1)  # [batch, pieces]
    before = jnp.moveaxis(_last_before(ends, jnp.full_like(ends[..., 0], -1)), -1, 0)[pieces.numbers]
    previous = _last_before(ids, before)
    return (ids >= 0) & (previous >= 0) & (ids != previous)


def _last(ids: Array) -> Array:
    """Along the last dimension the last id so far that is none of padding, or -1."""
    place = jnp.where(ids >= 0, jnp.arange(ids.shape[-1]), -1)
    last = lax.cummax(place, axis=place.ndim - 1)
    return jnp.where(last >= 0, jnp.take_along_axis(ids, jnp.maximum(last, 0), axis=-1), -1)


def _last_before(ids: Array, first: Array) -> Array:
    """The same before each place, and before the first place ``first``."""
    return _last(jnp.concatenate([first[..., None], ids], axis=-1))[..., :-1]


class Inputs(NamedTuple):
    """``x [..., places, channels]`` and the ids ``[..., places]`` of their documents, negative for padding."""

    x: Array
    ids: Array

    def last(self, count: int) -> "Inputs":
        """The last ``count`` that are none of padding, after each other; before them padding, where they are fewer."""
        order = _order(self.ids, count)
        return Inputs(taken(self.x, order), taken(self.ids, order))

    def followed_by(self, other: "Inputs") -> "Inputs":
        return Inputs(jnp.concatenate([self.x, other.x], axis=-2), jnp.concatenate([self.ids, other.ids], axis=-1))


class TailIds(NamedTuple):
    """``first [batch]``: the id of the sequence's first token, 0 where all is padding. ``tails [pieces, batch, places]``."""

    first: Array
    tails: Array


def ids_of_tails(ids: Array, width: int, pieces: Pieces) -> TailIds:
    """Of this rank's ``ids [pieces of a rank, batch, piece]``. Each rank sends the first and the last ``width`` of each piece."""
    own = taken(ids, _order(ids, min(width, pieces.piece)))
    every = pieces.gather(jnp.concatenate([_first(ids, -1), own], axis=-1))
    return TailIds(jnp.maximum(_first(every[..., 0], 0)[0], 0), every[..., 1:])


def tails_of(ids: Array, width: int, x: Array) -> Array:
    """Of this rank's pieces of ``x``."""
    return Inputs(x, ids).last(min(width, x.shape[2])).x


def before_pieces(ids: TailIds, state: Array, tails: Array) -> tuple[Inputs, Array]:
    """The ``width`` inputs before each piece, ``[pieces, batch, width, ...]``, and those at the end of the sequence, of its last
    document alone. ``state [batch, width, channels]`` enters the sequence, and its first document."""
    width = state.shape[1]

    def step(before: Inputs, tail: Inputs) -> tuple[Inputs, Inputs]:
        return before.followed_by(tail).last(width), before

    start = Inputs(state, jnp.broadcast_to(ids.first[:, None], state.shape[:2]))
    every = Inputs(tails, ids.tails)
    (last, of_last), entering = lax.scan(step, vary(start, varying_axes(every)), every)
    runs = runs_of(of_last)
    return entering, jnp.where((runs == runs[:, -1:])[..., None], last, 0)


def runs_of(ids: Array) -> Array:
    """The numbers of the stretches of equal ids: a document is one, and another may have its id."""
    begins = jnp.diff(ids, axis=-1, prepend=ids[..., :1]) != 0
    return jnp.cumsum(begins, axis=-1)


def places_after(ids: Array) -> Array:
    """Where each of ``ids [..., places]`` is once padding has gone before all others."""
    real = ids >= 0
    padding = jnp.sum(~real, axis=-1, keepdims=True)
    return jnp.where(real, padding + jnp.cumsum(real, axis=-1), jnp.cumsum(~real, axis=-1)) - 1


def taken(x: Array, places: Array) -> Array:
    """``x [..., places, ...]`` at these places ``[..., count]``, of which no two are equal, so that cotangents are not summed."""
    pick = lambda x, places: x.at[places].get(mode="promise_in_bounds", unique_indices=True)  # noqa: E731
    for _ in range(places.ndim - 1):
        pick = jax.vmap(pick)
    return pick(x, places)


def unfolded(ids: Array) -> Array:
    """The same, behind a barrier: of ids that a traced function closes over XLA would compute constants as large as the inputs, for
    minutes."""
    return lax.optimization_barrier(ids)


def _order(ids: Array, count: int) -> Array:
    return jnp.argsort(ids >= 0, axis=-1, stable=True)[..., ids.shape[-1] - count :]


def _first(ids: Array, axis: int) -> Array:
    """The first along the axis that is none of padding, if there is one."""
    return jnp.take_along_axis(ids, jnp.argmax(ids >= 0, axis=axis, keepdims=True), axis=axis)
