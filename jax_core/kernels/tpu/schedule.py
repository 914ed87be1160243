"""The list of block pairs that a launch visits.

A launch visits the pairs of blocks on its list and no others. The list is made on the device from the positions of the two shards,
so a rank's program is the same whichever shards meet.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl

from jax_core.kernels.blocks import BlockSparsity, block_sparsity
from jax_core.kernels.contract import Pair
from jax_core.kernels.tpu.constants import BlockedExtras, TileConstants, quotient, remainder

FIRST, LAST, RUNS, MASKED = 1, 2, 4, 8  # flags: the pair is first in its row, last in its row, has visible pairs, needs its mask
_FLAGS = 16


class BlockSchedule(NamedTuple):
    """``words [batch|1 * length]``: a list of block pairs for each batch entry, as ``16 * (row * columns + column) + flags``.
    ``longest``: the length of the longest list; ``size``: the number of lists and the space for each."""

    words: Array
    longest: Array
    size: tuple[int, int]


def pairs_to_visit(const: TileConstants, pair: Pair, blocked: BlockedExtras[Array]) -> BlockSparsity:
    """Which pairs of blocks have something to compute, and which of them are fully visible, so that they need no mask."""
    pairs = block_sparsity(const.q, const.k, pair)
    if const.in_kernel:
        pairs = pairs._replace(whole=jnp.zeros_like(pairs.whole))
    if blocked.mask is None:
        return pairs
    rows, columns = blocked.mask.shape[2], const.k.blocks
    tiles = blocked.mask.reshape(
        *blocked.mask.shape[:2], -1 if rows > 1 else 1, const.q.block if rows > 1 else 1, columns, const.k.block
    )
    return BlockSparsity(pairs.visible & (tiles != 0).any((1, 3, 5)), pairs.whole & (tiles != 0).all((1, 3, 5)))


def flags_of(pairs: BlockSparsity) -> Array:
    """The flags that say what a pair of blocks needs."""
    return jnp.where(pairs.visible, RUNS, 0) | jnp.where(pairs.whole, 0, MASKED)


def make_schedule(pairs: BlockSparsity, by_columns: bool = False) -> BlockSchedule:
    """The pairs by rows of query blocks, or by columns of key blocks. A row without a visible pair gets one visit that computes
    nothing, so that its result is written."""
    visible, whole = (jnp.swapaxes(x, 1, 2) if by_columns else x for x in pairs)
    batch, rows, columns = visible.shape
    visits = visible | (~visible.any(-1, keepdims=True) & (jnp.arange(columns) == 0))
    number = jnp.cumsum(visits, -1)
    flags = jnp.where(number == 1, FIRST, 0) | jnp.where(number == visits.sum(-1, keepdims=True), LAST, 0)
    flags = flags | flags_of(BlockSparsity(visible, whole))
    at = jnp.arange(rows)[:, None] * columns + jnp.arange(columns)
    if by_columns:
        at = jnp.arange(columns) * rows + jnp.arange(rows)[:, None]
    words, visited = (at * _FLAGS + flags).reshape(batch, -1), visits.reshape(batch, -1)
    count = visited.sum(-1)
    order = jax.vmap(lambda row: jnp.nonzero(row, size=row.shape[0], fill_value=0)[0])(visited)
    listed = jnp.take_along_axis(words, order, 1)
    # A list shorter than the longest repeats its last pair, with flags that compute nothing.
    last = jnp.take_along_axis(listed, count[:, None] - 1, 1) // _FLAGS * _FLAGS
    listed = jnp.where(jnp.arange(rows * columns) < count[:, None], listed, last)
    return BlockSchedule(listed.reshape(-1).astype(jnp.int32), count.max().astype(jnp.int32), (batch, rows * columns))


def visit(const: TileConstants, size: tuple[int, int], words: Ref, batch: Array, number: Array) -> tuple[Array, Array, Array]:
    """``(query block, key block, flags)`` of a visit, from the lists in scalar memory."""
    lists, length = size
    word = words[(batch * length if lists > 1 else 0) + number]
    at = quotient(word, _FLAGS)
    return quotient(at, const.k.blocks), remainder(at, const.k.blocks), remainder(word, _FLAGS)


def update_if_visible(flags: Array, update: Callable[[bool], None]) -> None:
    """Calls ``update(masked)`` if the pair of blocks has something to compute; unmasked if it is fully visible."""
    for masked in (False, True):

        @pl.when((flags & (RUNS | MASKED)) == (RUNS | MASKED if masked else RUNS))
        def run(masked: bool = masked) -> None:
            update(masked)
