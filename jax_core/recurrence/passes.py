"""The forward and the backward around maps and chunks: pure functions of local shards, like the pair of an attention strategy."""

from jax import Array

from jax_core.recurrence.chunks import Chunks, cut, uncut
from jax_core.recurrence.pieces import Pieces
from jax_core.recurrence.prefix import Affine, composed, prefix, product, states, transposed


def along(maps: Affine, initial: Array, pieces: Pieces) -> tuple[Array, Array, Array]:
    """``(starts, last, entering)`` of this rank's ``maps``, along the first dimension of each of its pieces: the state that enters
    each map; the one that leaves the sequence, the same on all ranks; and the ones ``[pieces, ...]`` that enter this rank's pieces,
    which the backward takes. ``initial`` enters the sequence."""
    if pieces.count == 1:
        entering = initial[None]
        starts, last = states(maps, entering)
        return starts, last[0], entering
    entering, last = prefix(composed(maps), initial, pieces)
    return states(maps, entering)[0], last, entering


def back_along(maps: Affine, starts: Array, direct: Array, dlast: Array, pieces: Pieces) -> tuple[Affine, Array]:
    """The cotangents of the maps and of the initial state, for ``direct``, those of ``starts``. ``dlast``: that of the state that
    leaves the sequence, the same on all ranks. They go back as the states came: by the transposed maps, in reverse order."""
    back = maps.adjoint(direct)
    if pieces.count == 1:
        leaving = dlast[None]
    else:
        leaving, dinitial = prefix(composed(back, reverse=True), dlast, pieces, reverse=True)
    dstates, first = states(back, leaving, reverse=True)
    return Affine(maps.gradient_of_m(dstates, starts), dstates), first[0] if pieces.count == 1 else dinitial


def forward(chunks: Chunks, initial: Array, pieces: Pieces) -> tuple[Array, Array, Array]:
    """``(y, last, entering)``: ``y [pieces, batch, length, heads, value_dim]``, and as :func:`along` of states ``[batch, heads,
    key_dim, value_dim]``."""
    starts, last, entering = along(chunks.maps, initial, pieces)
    return uncut(chunks.own + product(chunks.reads, starts), pieces.piece), last, entering


def backward(chunks: Chunks, entering: Array, dy: Array, dlast: Array, pieces: Pieces) -> tuple[Chunks, Array]:
    """The cotangents of the chunks and of the initial state."""
    starts, _ = states(chunks.maps, entering)
    dy = cut(dy, chunks.own.shape[-2])
    dmaps, dinitial = back_along(chunks.maps, starts, product(transposed(chunks.reads), dy), dlast, pieces)
    return Chunks(dmaps, product(dy, transposed(starts)), dy), dinitial
