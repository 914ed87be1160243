"""The forward and the backward around chunks: pure functions of local shards, like the pair of an attention strategy."""

from jax import Array

from jax_core.recurrence.chunks import Chunks, cut, uncut
from jax_core.recurrence.pieces import Pieces
from jax_core.recurrence.prefix import Affine, composed, prefix, product, states, transposed


def forward(chunks: Chunks, initial: Array, pieces: Pieces) -> tuple[Array, Array, Array]:
    """``(y, last, entering)``: ``y [pieces, batch, length, heads, value_dim]``; the state ``[batch, heads, key_dim, value_dim]``
    that leaves the sequence, the same on all ranks; and the ones ``[pieces, ...]`` that enter this rank's pieces, which the
    backward takes. ``initial`` enters the sequence."""
    if pieces.count == 1:
        entering = initial[None]
        starts, last = states(chunks.maps, entering)
        last = last[0]
    else:
        entering, last = prefix(composed(chunks.maps), initial, pieces)
        starts, _ = states(chunks.maps, entering)
    return uncut(chunks.own + product(chunks.reads, starts), pieces.piece), last, entering


def backward(chunks: Chunks, entering: Array, dy: Array, dlast: Array, pieces: Pieces) -> tuple[Chunks, Array]:
    """The cotangents of the chunks and of the initial state. ``dlast``: that of the state that leaves the sequence, the same on all
    ranks. The cotangents of states go back as the states came: by the transposed maps, in reverse order."""
    starts, _ = states(chunks.maps, entering)
    dy = cut(dy, chunks.own.shape[-2])
    back = chunks.maps.adjoint(product(transposed(chunks.reads), dy))
    if pieces.count == 1:
        leaving = dlast[None]
    else:
        leaving, dinitial = prefix(composed(back, reverse=True), dlast, pieces, reverse=True)
    dstates, first = states(back, leaving, reverse=True)
    dmaps = Affine(chunks.maps.gradient_of_m(dstates, starts), dstates)
    return Chunks(dmaps, product(dy, transposed(starts)), dy), first[0] if pieces.count == 1 else dinitial
