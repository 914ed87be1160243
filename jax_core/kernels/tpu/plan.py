"""What the Pallas kernels are compiled for, the list of block pairs that a launch visits, and the arrays it takes.

Arrays come as ``[batch, heads, length, dim]``, every run filled up to whole blocks; what belongs to a row of queries or keys is
``[batch|1, (heads|1,) 1, length]``. A launch visits the pairs of blocks on its list and no others: the list is made on the device
from where the shards stand, so a rank's program is the same whatever it meets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_core.kernels.blocks import (
    BlockLayout,
    BlockSparsity,
    block_layout,
    block_sparsity,
    dense_mask,
    in_blocks,
    same_rows,
    starts,
)
from jax_core.kernels.contract import Extras, Scores
from jax_core.masks.functions import Predicate

FIRST, LAST, RUNS, MASKED = 1, 2, 4, 8  # a pair of blocks opens its row, closes it, has something to compute, in part
_FLAGS = 16


@dataclass(frozen=True)
class Plan:
    """The constants of a launch."""

    q: BlockLayout
    k: BlockLayout
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scores: Scores
    inside: tuple[Predicate, ...]  # mask functions that the kernel computes itself

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Shards(NamedTuple):
    """The large arrays of a pair; ``dout``, ``lse`` and ``delta`` in the backward alone."""

    q: Any
    k: Any
    v: Any
    dout: Any = None
    lse: Any = None
    delta: Any = None


class Beside(NamedTuple):
    """What rides beside them, each may be None: ids ``[batch|1, 1, length]``, ``bias`` and ``mask`` (int8)
    ``[batch|1, heads|1, rows|1, keys]``, ``slopes`` float32 ``[1, batch|1 * heads]``."""

    q_segments: Any
    k_segments: Any
    q_positions: Any
    k_positions: Any
    bias: Any
    mask: Any
    slopes: Any


class Visits(NamedTuple):
    """``words [batch|1 * length]``: a list of block pairs for each batch entry, as ``16 * (row * columns + column) + flags``.
    ``count``: how long the longest list is; ``size``: how many lists, and the space for each."""

    words: Any
    count: Any
    size: tuple[int, int]


def make_plan(shards, q_runs, k_runs, scores: Scores, extras: Extras, blocks: tuple[int, int]) -> Plan:
    q, k, v = shards
    inside = tuple(predicate for predicate in scores.predicates if predicate.elementwise)
    sides = block_layout(q_runs, blocks[0]), block_layout(k_runs, blocks[1])
    return Plan(*sides, q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], scores, inside)


def rows_of(x, where: BlockLayout, fill=0):
    """``[batch, length, heads, dim] -> [batch, heads, length in blocks, dim]``"""
    return in_blocks(jnp.swapaxes(x, 1, 2), 2, where, fill)


def numbers_of(x, where: BlockLayout, fill=0):
    """``[batch, heads, length] -> [batch, heads, 1, length in blocks]``"""
    return in_blocks(x, 2, where, fill)[:, :, None]


def make_beside(plan: Plan, shards, q_runs, k_runs, extras: Extras) -> Beside:
    segments = same_rows(extras.q_segment_ids, extras.kv_segment_ids)
    positions = same_rows(extras.q_position_ids, extras.kv_position_ids)
    given = zip(plan.scores.predicates, extras.predicate_arrays, strict=True)
    outside = [(predicate, arrays) for predicate, arrays in given if not predicate.elementwise]
    mask = dense_mask(shards, q_runs, k_runs, outside, extras)
    slopes = extras.alibi_slopes
    return Beside(
        _ids(segments[0], plan.q),
        _ids(segments[1], plan.k),
        _ids(positions[0], plan.q),
        _ids(positions[1], plan.k),
        _tiles(_on_tpu(extras.bias), plan),
        None if mask is None else _tiles(mask, plan).astype(jnp.int8),
        None if slopes is None else slopes.astype(jnp.float32).reshape(1, -1),
    )


def _on_tpu(bias):
    """A TPU has no float16."""
    return bias.astype(jnp.float32) if bias is not None and bias.dtype == jnp.float16 else bias


def _ids(ids, where: BlockLayout):
    return None if ids is None else in_blocks(ids, 1, where)[:, None].astype(jnp.int32)


def _tiles(x, plan: Plan):
    if x is None:
        return None
    x = in_blocks(x, 3, plan.k, 0)
    return x if x.shape[2] == 1 else in_blocks(x, 2, plan.q, 0)


def where_and_seed(q_runs, k_runs, extras: Extras):
    """int32 ``[8]``: the first positions of the runs, the first batch entry and head, the dropout seed."""
    seed = jnp.zeros(2, jnp.uint32) if extras.dropout_seed is None else extras.dropout_seed
    words = lax.bitcast_convert_type(seed.astype(jnp.uint32), jnp.int32)
    return jnp.concatenate([starts(q_runs, k_runs, extras), words])


def make_pairs(plan: Plan, q_runs, k_runs, extras: Extras, beside: Beside) -> BlockSparsity:
    """Which pairs of blocks to visit, of which what is visible altogether needs no mask."""
    pairs = block_sparsity(plan.q, plan.k, q_runs, k_runs, plan.scores, extras)
    if plan.inside:
        pairs = pairs._replace(whole=jnp.zeros_like(pairs.whole))
    if beside.mask is None:
        return pairs
    rows, columns = beside.mask.shape[2], plan.k.blocks
    tiles = beside.mask.reshape(
        *beside.mask.shape[:2], -1 if rows > 1 else 1, plan.q.block if rows > 1 else 1, columns, plan.k.block
    )
    return BlockSparsity(pairs.visible & (tiles != 0).any((1, 3, 5)), pairs.whole & (tiles != 0).all((1, 3, 5)))


def kinds(pairs: BlockSparsity):
    """The flags that say what a pair of blocks needs."""
    return jnp.where(pairs.visible, RUNS, 0) | jnp.where(pairs.whole, 0, MASKED)


def list_visits(pairs: BlockSparsity, by_columns: bool = False) -> Visits:
    """Row after row of query blocks, or column after column of key blocks. A row without a visible pair has one visit that
    computes nothing, so that its result is written."""
    visible, whole = (jnp.swapaxes(x, 1, 2) if by_columns else x for x in pairs)
    batch, rows, columns = visible.shape
    visits = visible | (~visible.any(-1, keepdims=True) & (jnp.arange(columns) == 0))
    number = jnp.cumsum(visits, -1)
    flags = jnp.where(number == 1, FIRST, 0) | jnp.where(number == visits.sum(-1, keepdims=True), LAST, 0)
    flags = flags | kinds(BlockSparsity(visible, whole))
    at = jnp.arange(rows)[:, None] * columns + jnp.arange(columns)
    if by_columns:
        at = jnp.arange(columns) * rows + jnp.arange(rows)[:, None]
    words, kept = (at * _FLAGS + flags).reshape(batch, -1), visits.reshape(batch, -1)
    count = kept.sum(-1)
    order = jax.vmap(lambda row: jnp.nonzero(row, size=row.shape[0], fill_value=0)[0])(kept)
    listed = jnp.take_along_axis(words, order, 1)
    # A shorter list than the longest stays where it is and does nothing.
    last = jnp.take_along_axis(listed, count[:, None] - 1, 1) // _FLAGS * _FLAGS
    listed = jnp.where(jnp.arange(rows * columns) < count[:, None], listed, last)
    return Visits(listed.reshape(-1).astype(jnp.int32), count.max().astype(jnp.int32), (batch, rows * columns))


def visit(plan: Plan, size: tuple[int, int], words, batch, number):
    """``(query block, key block, flags)`` of a visit, from the lists in scalar memory."""
    lists, length = size
    word = words[(batch * length if lists > 1 else 0) + number]
    at = quotient(word, _FLAGS)
    return quotient(at, plan.k.blocks), remainder(at, plan.k.blocks), remainder(word, _FLAGS)


def quotient(x, by: int):
    """Of numbers that are not negative, which is cheaper than ``//``."""
    return lax.div(x, x.dtype.type(by))


def remainder(x, by: int):
    return lax.rem(x, x.dtype.type(by))


def when_it_runs(flags, update: Callable[[bool], None]) -> None:
    """``update(masked)`` for a pair of blocks that has something to compute; one visible altogether goes without its mask."""
    for masked in (False, True):

        @pl.when((flags & (RUNS | MASKED)) == (RUNS | MASKED if masked else RUNS))
        def run(masked=masked):
            update(masked)
