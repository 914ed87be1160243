"""A layout as a table of pieces: which piece of the sequence is the how-manieth of which rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_core.masks.layout import Layout, check_shard_length, runs
from jax_core.options import AxisName
from jax_core.strategies.transfers.transfer import ordered_after


@dataclass(frozen=True)
class Pieces:
    """The sequence over a ring: ``size`` ranks along ``axis_name`` (None: one device), each with a shard of ``length`` positions.

    A piece is a run of consecutive positions. All are of one length, and numbered in the order of the sequence. Local arrays are
    ``[batch, length, ...]`` and, cut into pieces, ``[pieces of a rank, batch, piece, ...]``.
    """

    axis_name: AxisName
    size: int
    layout: Layout
    length: int

    @cached_property
    def table(self) -> np.ndarray:
        """int32 ``[ranks, pieces of a rank]``: their numbers, in the order of the shard."""
        shards = [runs(self.layout, rank, self.size, self.length) for rank in range(self.size)]
        return np.array([[run.start // self.piece for run in of_rank] for of_rank in shards], np.int32)

    @cached_property
    def piece(self) -> int:
        """The length of a piece."""
        return runs(self.layout, 0, self.size, self.length)[0].length

    @property
    def count(self) -> int:
        """Of the whole sequence."""
        return self.table.size

    @property
    def rank(self) -> Array | int:
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name)

    @property
    def places(self) -> Array:
        """int32 ``[length]``: the positions of this rank's tokens."""
        shard = runs(self.layout, self.rank, self.size, self.length)
        return jnp.concatenate([run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32) for run in shard])

    @property
    def numbers(self) -> Array:
        """The numbers of this rank's pieces."""
        return jnp.asarray(self.table)[self.rank]

    def split(self, x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.piece, *x.shape[2:]), 1, 0)

    def join(self, x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], self.length, *x.shape[3:])

    def gather(self, x: Array, after: Array | None = None) -> Array:
        """Of this rank's ``[pieces of a rank, ...]`` those of all ranks, ``[pieces, ...]`` in the order of the sequence. Nothing is
        sent before ``after`` is computed."""
        return self._of_ranks(x, after).reshape(-1, *x.shape[1:])[np.argsort(self.table.reshape(-1))]

    def sum(self, x: Array, after: Array) -> Array:
        """Over ranks, in their order: the same bits on all of them, and in every run."""
        return jnp.sum(self._of_ranks(x, after), axis=0)

    def _of_ranks(self, x: Array, after: Array | None) -> Array:
        """``[ranks, ...]``"""
        return x[None] if self.axis_name is None else sent(partial(lax.all_gather, axis_name=self.axis_name), x, after)


def sent(send: Callable[[Array], Array], x: Array, after: Array | None) -> Array:
    """``send(x)``, bit for bit, and not before ``after`` is computed: XLA on CPU may run two exchanges in a different order on each
    device, and it sends 16-bit floats as float32."""
    words = _words(x)
    return lax.bitcast_convert_type(send(words if after is None else ordered(words, after)), x.dtype)


def ordered(x: Array, after: Array) -> Array:
    """``x``, bit for bit, not before ``after`` is computed."""
    if not x.size:
        return x
    words = ordered_after(_words(x).reshape(-1), after).reshape(x.shape)  # type: ignore[union-attr]
    return lax.bitcast_convert_type(words, x.dtype)


def _words(x: Array) -> Array:
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def pieces_of_a_rank(layout: Layout, size: int) -> int:
    """However long the shards are."""
    if not isinstance(layout, str):
        return len(layout.table[0])  # type: ignore[attr-defined]
    return 2 if layout == "zigzag" and size > 1 else 1


def pieces_of(axis_name: AxisName, size: int, layout: Layout, length: int) -> Pieces:
    """Raises ValueError for a length that the layout does not divide."""
    check_shard_length(layout, length, size=size)
    return Pieces(axis_name, size, "contiguous" if size == 1 else layout, length)
