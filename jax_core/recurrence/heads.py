"""Ulysses: an all-to-all of heads (Jacobs et al. 2023, arXiv:2309.14509). Each rank gives its shard of all heads for the whole
sequence of some, in the order of the sequence, and computes those as if it were alone.

All that a pass needs is one message, block ``i`` of it to rank ``i``: the heads of rank ``i`` of what has tokens, and all ids. Of
what all ranks hold a rank takes its heads. Key heads are repeated as few times as lets all ranks have equally many.
"""

from collections.abc import Sequence
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import accumulation_dtype
from jax_core.recurrence.layer import Cotangents, Given, Layer, Operand, Results, Shaped, dims_of
from jax_core.recurrence.pieces import Pieces, ordered, sent
from jax_core.strategies.transfers.exchange import in_sequence_order, in_shards
from jax_core.strategies.transfers.transfer import pack, unpack, wire_dtype

Arrays = Sequence[Array | None]


def forward(alone: Layer, pieces: Pieces, given: Given) -> Results:
    """As of the layer's contract. ``alone``: the layer as one rank computes it. What is kept is of this rank's heads."""
    exchange = Exchange(alone, pieces, given)
    arrived = exchange.there(_Message(given.operands, given.ids))
    y, last, kept = alone.forward(exchange.whole, exchange.given(arrived))
    blocks = in_shards(y, pieces.layout, pieces.size), exchange.to_all(last) if alone.final_state else None
    y, last_of_ranks = exchange.swapped(blocks)
    y, last = _merged(y, 2), _zeros_of_all(last, pieces.size) if last_of_ranks is None else _merged(last_of_ranks, 1)
    # The backward's message comes after it: not before the forward's last, nor merged with its first, which would be kept for it.
    return Results(y, last, ordered(kept, y))


def backward(alone: Layer, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
    exchange = Exchange(alone, pieces, given)
    dlast = d.last if alone.final_state else None
    arrived = exchange.there(_Message(given.operands, given.ids, d.y, dlast), after=kept)
    assert arrived.dy is not None
    gradients, dstate = alone.backward(exchange.whole, exchange.given(arrived), kept, Cotangents(arrived.dy, arrived.dlast))
    return exchange.gradients(gradients), exchange.of_all(dstate, 1)


def heads_sent(dims: str, x: Shaped, size: int) -> int:
    """Of an operand with tokens."""
    return lcm(x.shape[2], size) if "n" in dims else x.shape[2]


class _Message(NamedTuple):
    """``operands``, of which those with tokens are sent; ``ids``; and the cotangents of the results, that of ``last`` by heads."""

    operands: Arrays
    ids: Array | None
    dy: Array | None = None
    dlast: Array | None = None


class Exchange:
    """Of a layer's arrays over the ranks of ``pieces``. ``whole``: the sequence as a rank has it after the exchange."""

    def __init__(self, layer: Layer, pieces: Pieces, given: Given) -> None:
        self.pieces, self.size, self.state = pieces, pieces.size, given.state
        self.whole = Pieces(None, 1, "contiguous", pieces.length * pieces.size)
        self.operands = [_Given(of, x) for of, x in zip(layer.signature, given.operands, strict=True)]

    def there(self, message: _Message, after: Array | None = None) -> _Message:
        """From a message of this rank's tokens to one of all tokens and this rank's heads; nothing is sent before ``after``."""
        blocks = _Message(
            [self._of_heads(self._repeated(each), 2) if each.has_tokens else None for each in self.operands],
            None if message.ids is None else self.to_all(message.ids),
            None if message.dy is None else self._of_heads(message.dy, 2),
            None if message.dlast is None else self._of_heads(message.dlast, 1),
        )
        came = self.swapped(blocks, after)
        operands, ids, dy = jax.tree.map(lambda x: in_sequence_order(x, self.pieces.layout), came[:3])
        operands = [self._own(each) if x is None else x for each, x in zip(self.operands, operands, strict=True)]
        return _Message(operands, ids, dy, None if came.dlast is None else came.dlast.sum(0))

    def given(self, arrived: _Message) -> Given:
        """What the layer is given of this rank's heads."""
        return Given(arrived.operands, None if self.state is None else self._own_heads(self.state, 1), arrived.ids)

    def gradients(self, gradients: Arrays) -> list[Array | None]:
        """Those of this rank's operands; of those that all ranks hold, this rank's part: 0 for others' heads."""
        pairs = list(zip(self.operands, gradients, strict=True))
        blocks = [in_shards(d, self.pieces.layout, self.size) if of.has_tokens and d is not None else None for of, d in pairs]
        came = self.swapped(blocks)
        return [
            self._summed(_merged(block, 2), of) if block is not None else None if d is None else self.of_all(d, 0)
            for (of, d), block in zip(pairs, came, strict=True)
        ]

    def of_all(self, x: Array, axis: int) -> Array:
        """Of this rank's heads as of all heads, 0 for those of others."""
        zeros = _zeros_of_all(x, self.size, axis)
        return lax.dynamic_update_slice_in_dim(zeros, x, self.pieces.rank * x.shape[axis], axis)

    def to_all(self, x: Array) -> Array:
        return jnp.broadcast_to(x, (self.size, *x.shape))

    def swapped(self, blocks: Any, after: Array | None = None) -> Any:
        """Of a tree of arrays ``[ranks, ...]`` block ``i`` goes to rank ``i``; in the result it is the one from there."""
        leaves = jax.tree.leaves(blocks)
        word = wire_dtype(min((x.dtype for x in leaves), key=lambda dtype: dtype.itemsize), packed=True)
        words: Array = jax.vmap(lambda tree: pack(tree, word))(blocks)  # type: ignore[assignment]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)
        send = partial(lax.all_to_all, axis_name=self.pieces.axis_name, split_axis=0, concat_axis=0)
        return jax.vmap(lambda words: unpack(words, like))(sent(send, words, after))

    def _of_heads(self, x: Array, axis: int) -> Array:
        """A block for each rank: its heads."""
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.size, -1, *x.shape[axis + 1 :]), axis, 0)

    def _own(self, of: "_Given") -> Array | None:
        return None if of.x is None else self._own_heads(of.x, 0)

    def _own_heads(self, x: Array, axis: int) -> Array:
        heads = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, self.pieces.rank * heads, heads, axis)

    def _repeated(self, of: "_Given") -> Array:
        assert of.x is not None
        times = heads_sent(of.dims, of.x, self.size) // of.x.shape[2]
        return of.x if times == 1 else jnp.repeat(of.x, times, axis=2)

    def _summed(self, gradient: Array, of: "_Given") -> Array:
        """Over the times that a key head was repeated."""
        assert of.x is not None
        if gradient.shape == of.x.shape:
            return gradient
        times = gradient.reshape(*of.x.shape[:3], -1, *of.x.shape[3:]).astype(accumulation_dtype(gradient.dtype))
        return times.sum(3).astype(of.x.dtype)


class _Given:
    def __init__(self, operand: Operand, x: Array | None) -> None:
        self.x, self.dims = x, "" if x is None else dims_of(operand, x)

    @property
    def has_tokens(self) -> bool:
        return "t" in self.dims


def _merged(x: Array, axis: int) -> Array:
    """The heads of all ranks ``[ranks, ...]`` along this axis of each."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _zeros_of_all(x: Array, size: int, axis: int = 1) -> Array:
    return jnp.zeros((*x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 1 :]), x.dtype)
