"""Gradients as flash-attn-4's backward accumulates them: float32, in an order of elements that its tiles decide."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.cute import rectangles
from jax_core.kernels.cute.calls import Shaped, call
from jax_core.kernels.cute.settings import ConvertSettings
from jax_core.kernels.cute.tiles import BackwardTile
from jax_core.varying import vary, varying_axes


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["tile", "of", "packed"])
@dataclass(frozen=True)
class Accumulator:
    """``values``: ``[batch, heads, rows * padded dim]``, or, if ``packed``, ``[heads, all rows * padded dim]``, in which each
    sequence begins with a tile. ``of``: whose gradient, "query" or "key" (or value)."""

    values: Array
    tile: BackwardTile
    of: str
    packed: bool

    def shaped(self, packed: bool, group: int) -> Shaped:
        """As an operand of a call whose other operands are ``packed`` or not."""
        heads, length = self.values.shape[-2:]
        shape = (heads, length) if packed else self.values.shape if not self.packed else (1, heads, length)
        whole_rows = _tile_rows(self.tile, self.of) * self.tile.multiple
        return Shaped(self.values.reshape(shape), (*(1,) * (len(shape) - 2), group, whole_rows))

    def filled(self, values: Array) -> Self:
        return replace(self, values=values.reshape(self.values.shape))


@partial(jax.tree_util.register_dataclass, data_fields=["local", "others"], meta_fields=[])
@dataclass(frozen=True)
class Joined:
    """A gradient in two parts: ``local``, like its operand and with its factor, of a rank's own documents; sums of all others."""

    local: Array
    others: Accumulator


def zeros(
    x: Array, of: str, tile: BackwardTile, sequences: int, after: Accumulator | None = None, zero: float = 0.0
) -> Accumulator:
    """For the gradient of ``x [batch, length, heads, dim]``; filled when ``after`` has its values, or XLA would fill those of all
    steps of a ring at once. ``sequences``: how many lie in it, if it is packed."""
    batch, length, heads, dim = x.shape
    rows, packed = _tile_rows(tile, of), sequences > 0
    length = (batch * length + (sequences + 1) * rows - 1) // rows * rows if packed else -(-length // rows) * rows
    shape = (heads, length * tile.padded(dim))
    fill = jnp.float32(zero)
    if after is not None:
        fill, _ = lax.optimization_barrier((fill, after.values))
    values = jnp.full(shape if packed else (batch, *shape), fill)
    return Accumulator(vary(values, varying_axes(x)), tile, of, packed)


def converted(
    accumulator: Accumulator, operand: Array, factor: float, where: tuple[Array | None, Array | None] | None = None
) -> Array:
    """The gradient of ``operand``: ``factor`` times the sums, in its dtype. ``where``: offsets and lengths of the sequences of
    packed sums, if they are not the batch entries; other rows may hold anything."""
    batch, length, _, dim = operand.shape
    settings = ConvertSettings(accumulator.of, str(operand.dtype), dim, factor, accumulator.tile)
    offsets, lengths = where or (rectangles.offsets(batch, length) if accumulator.packed else None, None)
    places = tuple(None if x is None else Shaped(x, (1,)) for x in (offsets, lengths))
    result = rows_of(jax.ShapeDtypeStruct(operand.shape, operand.dtype), 1, accumulator.packed)
    (gradient,) = call("convert", settings, [accumulator.shaped(accumulator.packed, 1), places], [], [result])
    return gradient.reshape(operand.shape)


def _tile_rows(tile: BackwardTile, of: str) -> int:
    return tile.tile_m if of == "query" else tile.tile_n


def rows_of(x: Array | jax.ShapeDtypeStruct, group: int, packed: bool) -> Shaped:
    """An operand or result ``[batch, length, heads, dim]``; ``packed``: as ``[batch * length, heads, dim]``. ``group`` divides the
    number of heads."""
    batch, length, heads, dim = x.shape
    shape, units = ((batch * length, heads, dim), (1, group, dim)) if packed else (x.shape, (1, 1, group, dim))
    return Shaped(x.reshape(shape) if isinstance(x, Array) else jax.ShapeDtypeStruct(shape, x.dtype), units)
