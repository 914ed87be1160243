"""A short causal convolution of each channel, which needs the inputs just before each piece alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import accumulation_dtype
from jax_core.masks.layout import Layout
from jax_core.recurrence.documents import (
    Inputs,
    TailIds,
    before_pieces,
    ids_of_tails,
    places_after,
    runs_of,
    tails_of,
    taken,
    unfolded,
)
from jax_core.recurrence.halo import halo, halo_back
from jax_core.recurrence.layer import Cotangents, Given, Layer, Operand, Results
from jax_core.recurrence.pieces import Pieces, pieces_of_a_rank


@dataclass(frozen=True)
class Convolution(Layer):
    """``y_t = activation(bias + sum_j weight[:, width - 1 - j] x_{t - j})``, of the ``x`` in the document of ``t``, between
    which there may be padding. Its state is the last ``width - 1`` inputs of the document. ``activation``: "silu" or None."""

    activation: str | None = None

    name = "causal_conv1d"
    signature = Operand("x", ("btc",)), Operand("weight", ("cw",)), Operand("bias", ("c",), optional=True)
    like = "x"
    state_dims = "bsc"

    def state_dtype(self, dtype: DTypeLike) -> DTypeLike:
        return dtype

    def kept_shape(self, sizes: dict[str, int], layout: Layout, size: int) -> tuple[int, ...]:
        return pieces_of_a_rank(layout, size), sizes["b"], sizes["s"], sizes["c"]

    def forward(self, pieces: Pieces, given: Given) -> Results:
        (x, weight, bias), state, ids = given
        assert x is not None and weight is not None
        x, width = pieces.split(x), weight.shape[1] - 1
        state = jnp.zeros((x.shape[1], width, x.shape[3]), x.dtype) if state is None else state.astype(x.dtype)
        if ids is None:
            seen, before = None, _with_state(pieces, halo(x, width, pieces), state)
            last = _end(state, pieces.gather(_tail(x, width), after=before)) if self.final_state else state
        else:
            ids = pieces.split(unfolded(ids))
            of_tails = ids_of_tails(ids, width, pieces)
            every, last = before_pieces(of_tails, state, pieces.gather(tails_of(ids, width, x), after=of_tails.tails))
            before, before_ids = (each[pieces.numbers] for each in every)
            seen = _Seen(ids, before_ids)
        return Results(pieces.join(self._convolved(seen, x, before, weight, bias)), last, before)

    def backward(self, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
        (x, *others), state, ids = given
        assert x is not None
        x, dy = pieces.split(x), pieces.split(d.y)
        back, seen = partial(_back, pieces), None
        if ids is not None:
            ids = pieces.split(unfolded(ids))
            of_tails = ids_of_tails(ids, kept.shape[2], pieces)
            every, _ = before_pieces(of_tails, kept[0], jnp.zeros((*of_tails.tails.shape, x.shape[3]), x.dtype))
            seen, back = _Seen(ids, every.ids[pieces.numbers]), partial(_back_of_documents, pieces, ids, of_tails)
        _, pull = jax.vjp(partial(self._convolved, seen), x, kept, *others)
        dx, dbefore, *dothers = pull(dy.astype(x.dtype))
        more, dstate = back(x, dbefore, d.last.astype(x.dtype) if self.final_state and d.last is not None else None)
        return [pieces.join(dx + more), *dothers], dstate if state is None else dstate.astype(state.dtype)

    def _convolved(self, seen: "_Seen | None", x: Array, before: Array, weight: Array, bias: Array | None) -> Array:
        dtype, length = accumulation_dtype(x.dtype), x.shape[2]
        both, own, taps = jnp.concatenate([before, x], axis=2), None, []
        if seen is not None:
            both, own = seen.without_padding(both)
        for tap in range(weight.shape[1]):
            inputs = both[:, :, tap : tap + length]
            if own is not None:
                inputs = jnp.where(own(tap)[..., None], inputs, 0)
            taps.append(inputs.astype(dtype) * weight[:, tap].astype(dtype))
        y = sum(taps[1:], taps[0])
        y = y if bias is None else y + bias.astype(dtype)
        y = jax.nn.silu(y) if self.activation == "silu" else y
        return (y if seen is None else seen.with_padding(y)).astype(x.dtype)


class _Seen(NamedTuple):
    """Ids ``[pieces of a rank, batch, piece]``, and those ``before`` each piece."""

    ids: Array
    before: Array

    def without_padding(self, both: Array) -> tuple[Array, Callable[[int], Array]]:
        """The inputs before a piece and in it, padding before all others; and whether the one that a tap of the weight takes is in
        the document of the token at each of the last places, as many as a piece has."""
        length, ids = self.ids.shape[2], jnp.concatenate([self.before, self.ids], axis=2)
        both, ids = Inputs(both, ids).last(ids.shape[2])
        runs = jnp.where(ids >= 0, runs_of(ids), -1)
        here = runs[:, :, -length:]
        return both, lambda tap: (here >= 0) & (runs[:, :, tap : tap + length] == here)

    def with_padding(self, y: Array) -> Array:
        """Back at their places."""
        return jnp.where((self.ids >= 0)[..., None], taken(y, places_after(self.ids)), 0)


def _back(pieces: Pieces, x: Array, dbefore: Array, dlast: Array | None) -> tuple[Array, Array]:
    """The cotangents of the inputs and of the state, of that this rank's part, for those of what is before each piece and of the
    last inputs."""
    width = dbefore.shape[2]
    dbefore, dstate = jax.vjp(partial(_with_state, pieces), dbefore, dbefore[0])[1](dbefore)
    dx = halo_back(dbefore, pieces)
    if dlast is None:
        return dx, dstate
    ends = jnp.zeros((pieces.count, *_tail(x, width).shape[1:]), x.dtype)
    more, dends = jax.vjp(_end, dbefore[0], ends)[1](pieces.sum(dlast, after=dx))
    dends = dends[pieces.numbers]
    return dx.at[:, :, -dends.shape[2] :].add(dends), dstate + jnp.where(pieces.numbers[0] == 0, more, 0)


def _back_of_documents(
    pieces: Pieces, ids: Array, of_tails: TailIds, x: Array, dbefore: Array, dlast: Array | None
) -> tuple[Array, Array]:
    """The same, by the cotangents of what is before the pieces of all ranks."""
    every = pieces.gather(dbefore, after=of_tails.tails)
    total = jnp.zeros_like(every[0]) if dlast is None else pieces.sum(dlast, after=every)

    def joined(state: Array, tails: Array) -> tuple[Array, Array]:
        before, last = before_pieces(of_tails, state, tails)
        return before.x, last

    _, pull = jax.vjp(joined, total, jnp.zeros((*of_tails.tails.shape, x.shape[3]), x.dtype))
    dstate, dtails = pull((every, total))
    dx = jax.vjp(partial(tails_of, ids, dbefore.shape[2]), x)[1](dtails[pieces.numbers])[0]
    return dx, jnp.where(pieces.numbers[0] == 0, dstate, 0)


def _with_state(pieces: Pieces, before: Array, state: Array) -> Array:
    """What is before each piece, with the state before the sequence."""
    width = state.shape[1]
    place = pieces.numbers[:, None] * pieces.piece + jnp.arange(width)  # in the state
    entering = jnp.moveaxis(jnp.take(state, place, axis=1, mode="clip"), 1, 0)
    return jnp.where((place < width)[:, None, :, None], entering, before)


def _tail(x: Array, width: int) -> Array:
    return x[:, :, -width:]


def _end(state: Array, ends: Array) -> Array:
    """The last inputs of the sequence, as many as ``state`` has: of the ``ends`` of all pieces and, where the sequence is shorter,
    of the state that enters it."""
    row = jnp.moveaxis(ends, 0, 1).reshape(ends.shape[1], -1, ends.shape[3])
    return jnp.concatenate([state, row], axis=1)[:, -state.shape[1] :]
