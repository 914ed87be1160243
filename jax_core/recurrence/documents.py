"""Where documents begin, by the ids of a shard's tokens: negative ids are padding, and a document is a stretch of equal ids,
whatever padding is before, after or within it."""

import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.pieces import Pieces


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
