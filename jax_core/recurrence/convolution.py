"""A short causal convolution of each channel, which needs a halo alone."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import accumulation_dtype
from jax_core.masks.layout import Layout
from jax_core.recurrence.halo import halo, halo_back
from jax_core.recurrence.layer import Cotangents, Given, Layer, Operand, Results
from jax_core.recurrence.pieces import Pieces, pieces_of_a_rank


@dataclass(frozen=True)
class Convolution(Layer):
    """``y_t = activation(bias + sum_j weight[:, width - 1 - j] x_{t - j})``, of the ``x`` in the document of ``t``. Its state is
    the last ``width - 1`` inputs. ``activation``: "silu" or None."""

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
        seen = None if ids is None else _seen(pieces.split(ids), width, pieces)
        before = halo(x, width, pieces, after=None if seen is None else seen.before)
        before = _with_state(pieces, before, state)
        last = state
        if self.final_state:
            ends = pieces.gather(_tail(x, width), after=before)
            last = _end(_ids_of_ends(seen, width, pieces, ends), state, ends)
        return Results(pieces.join(self._convolved(seen, x, before, weight, bias)), last, before)

    def backward(self, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
        (x, *others), state, ids = given
        assert x is not None
        x, width = pieces.split(x), kept.shape[2]
        seen = None if ids is None else _seen(pieces.split(ids), width, pieces)
        _, pull = jax.vjp(partial(self._convolved, seen), x, kept, *others)
        dx, dbefore, *dothers = pull(pieces.split(d.y).astype(x.dtype))
        dbefore, dstate = jax.vjp(partial(_with_state, pieces), kept, kept[0])[1](dbefore)
        back = halo_back(dbefore, pieces)
        dx = dx + back
        if self.final_state and d.last is not None:
            total = pieces.sum(d.last.astype(x.dtype), after=back)
            of_ids = _ids_of_ends(seen, width, pieces, total)
            ends = jnp.zeros((pieces.count, *_tail(x, width).shape[1:]), x.dtype)
            more, dends = jax.vjp(partial(_end, of_ids), kept[0], ends)[1](total)
            dends = dends[pieces.numbers]
            dx, dstate = dx.at[:, :, -dends.shape[2] :].add(dends), dstate + jnp.where(pieces.numbers[0] == 0, more, 0)
        return [pieces.join(dx), *dothers], dstate if state is None else dstate.astype(state.dtype)

    def _convolved(self, seen: "_Seen | None", x: Array, before: Array, weight: Array, bias: Array | None) -> Array:
        dtype, length = accumulation_dtype(x.dtype), x.shape[2]
        both, taps = jnp.concatenate([before, x], axis=2), []
        for tap in range(weight.shape[1]):
            inputs = both[:, :, tap : tap + length]
            if seen is not None:
                inputs = jnp.where(seen.own_document(tap)[..., None], inputs, 0)
            taps.append(inputs.astype(dtype) * weight[:, tap].astype(dtype))
        y = sum(taps[1:], taps[0])
        y = y if bias is None else y + bias.astype(dtype)
        y = jax.nn.silu(y) if self.activation == "silu" else y
        return (y if seen is None else jnp.where((seen.ids >= 0)[..., None], y, 0)).astype(x.dtype)


class _Seen(NamedTuple):
    """Ids ``[pieces of a rank, batch, piece]``, and those ``before`` each piece."""

    ids: Array
    before: Array

    def own_document(self, tap: int) -> Array:
        """Whether the input of each token that a tap of the weight takes is in the token's document."""
        both = jnp.concatenate([self.before, self.ids], axis=2)
        return (self.ids >= 0) & (both[:, :, tap : tap + self.ids.shape[2]] == self.ids)


def _seen(ids: Array, width: int, pieces: Pieces) -> _Seen:
    """A state that enters the sequence is in the first token's document."""
    before = halo(ids, width, pieces)
    start = jnp.maximum(width - pieces.numbers * pieces.piece, 0)  # the place of the first token, or of the first that is seen
    place = jnp.maximum(jnp.arange(width), start[:, None])
    both = jnp.concatenate([before, ids], axis=2)
    return _Seen(ids, jnp.take_along_axis(both, place[:, None], axis=2))


def _with_state(pieces: Pieces, before: Array, state: Array) -> Array:
    """What is before each piece, with the state before the sequence."""
    width = state.shape[1]
    place = pieces.numbers[:, None] * pieces.piece + jnp.arange(width)  # in the state
    entering = jnp.moveaxis(jnp.take(state, place, axis=1, mode="clip"), 1, 0)
    return jnp.where((place < width)[:, None, :, None], entering, before)


def _tail(x: Array, width: int) -> Array:
    return x[:, :, -width:]


def _ids_of_ends(seen: _Seen | None, width: int, pieces: Pieces, after: Array) -> Array | None:
    return None if seen is None else pieces.gather(_tail(seen.ids, width), after=after)


def _end(ids: Array | None, state: Array, ends: Array) -> Array:
    """The last inputs of the sequence, as many as ``state`` has, of the last token's document: of the ``ends`` of all pieces and,
    where the sequence is shorter, of the state that enters it. ``ids``: those of the ends."""
    width = state.shape[1]
    last = jnp.concatenate([state, _in_a_row(ends)], axis=1)[:, -width:]
    if ids is None:
        return last
    row = _in_a_row(ids)
    row = jnp.concatenate([jnp.broadcast_to(row[:, :1], (row.shape[0], width)), row], axis=1)[:, -width:]
    return jnp.where(((row == row[:, -1:]) & (row >= 0))[..., None], last, 0)


def _in_a_row(x: Array) -> Array:
    """``[pieces, batch, places, ...]`` as ``[batch, all places, ...]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
