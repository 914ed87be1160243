"""Two shards in blocks: where the blocks are, and which pairs of blocks have anything to compute.

For kernels that visit blocks from a list. Maps are by block, not by position, so they stay small at any length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import Pair, Runs, Scores
from jax_core.masks.functions import Predicate, depends_on
from jax_core.masks.layout import Run
from jax_core.masks.static import Mask, empty, full
from jax_core.varying import vary


@dataclass(frozen=True)
class BlockLayout:
    """One side's shard: ``runs`` runs of ``length`` positions each, ``stride`` apart, in blocks of ``block`` positions; no
    block spans two runs."""

    runs: int
    length: int
    stride: int
    block: int
    blocks_per_run: int
    blocks: int
    even: bool  # every block is full: no padding


def block_layout(runs: Runs, block: int) -> BlockLayout:
    per_run = -(-runs[0].length // block)
    return BlockLayout(
        runs=len(runs),
        length=runs[0].length,
        stride=runs[0].stride,
        block=block,
        blocks_per_run=per_run,
        blocks=per_run * len(runs),
        even=runs[0].length % block == 0,
    )


class BlockSparsity(NamedTuple):
    """The block sparsity map, bool ``[batch|1, query blocks, key blocks]``: which pairs of blocks have a visible pair of positions,
    judged by bounds (``visible``), and which are fully visible (``whole``)."""

    visible: Array
    whole: Array


def block_sparsity(q: BlockLayout, k: BlockLayout, pair: Pair) -> BlockSparsity:
    """Considers the static mask, segment ids and position ids; boolean masks and mask functions may hide more."""
    extras, mask = pair.extras, pair.scores.mask
    sides = (
        (extras.q_position_ids, extras.q_segment_ids, pair.q_runs, q),
        (extras.kv_position_ids, extras.kv_segment_ids, pair.k_runs, k),
    )
    queries, keys = (
        Side(
            _in_rows(positions(position, runs), layout),
            None if segment is None else _in_rows(segment, layout),
        )
        for position, segment, runs, layout in sides
    )
    visible = any_visible(mask, queries, keys)
    (q_pos, q_seg), (k_pos, k_seg) = (_bounds(side, axis) for side, axis in ((queries, 2), (keys, 1)))
    whole = full(mask, _ends(q_pos), _ends(k_pos))
    if q_seg is not None and k_seg is not None:
        whole = whole & (q_seg.low == q_seg.high) & (k_seg.low == k_seg.high) & (q_seg.low == k_seg.low) & (q_seg.low >= 0)
    whole = whole & (_whole_blocks(q)[:, None] & _whole_blocks(k)[None, :])
    visible, whole = jnp.broadcast_arrays(visible, whole)
    return BlockSparsity(visible, whole & visible)


class Side(NamedTuple):
    """One side's positions and segment ids (or None), in blocks: ``[batch|1, blocks, block]`` each."""

    position: Array
    segment: Array | None


class _Bounds(NamedTuple):
    """The least and the greatest of some values."""

    low: Array
    high: Array


def any_visible(mask: Mask, q: Side, k: Side) -> Array:
    """Which pairs of blocks may have a visible pair, ``[batch|1, query blocks, key blocks]``.

    Without segments two blocks are judged by their bounds. With segments these say too little: a block with the end of one document
    and the start of another has wide bounds. So blocks are judged place by place in short shards; in longer ones by groups of
    places, and by the places of either block against the bounds of the other.
    """
    if q.segment is None or k.segment is None:
        return _overlap(mask, _bounds(q, 2), _bounds(k, 1))
    group = _group(q.segment.shape, k.segment.shape)
    pairs = _in_groups(mask, q, k, group, group)
    if group == 1:
        return pairs
    return pairs & _in_groups(mask, q, k, 1, k.segment.shape[2]) & _in_groups(mask, q, k, q.segment.shape[2], 1)


def _in_groups(mask: Mask, q: Side, k: Side, q_group: int, k_group: int) -> Array:
    """Which pairs of blocks hold a pair of groups, of so many places each, whose bounds overlap."""
    assert q.segment is not None and k.segment is not None
    queries, keys = (
        Side(*(x.reshape(x.shape[0], -1, group) for x in side if x is not None)) for side, group in ((q, q_group), (k, k_group))
    )
    pairs = _overlap(mask, _bounds(queries, 2), _bounds(keys, 1))
    (_, q_blocks, q_block), (_, k_blocks, k_block) = q.segment.shape, k.segment.shape
    return pairs.reshape(-1, q_blocks, q_block // q_group, k_blocks, k_block // k_group).any((2, 4))


_PAIRS = 2**22  # of groups, at most: more would cost more than the blocks that they save


def _group(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """The smallest power of two that divides the blocks of both sides, ``[batch|1, blocks, block]``, into few enough groups."""
    pairs, common, group = q[1] * q[2] * k[1] * k[2], math.gcd(q[2], k[2]), 1
    while pairs > _PAIRS * group**2 and common % (2 * group) == 0:
        group *= 2
    return group


def _overlap(mask: Mask, q: tuple[_Bounds, _Bounds | None], k: tuple[_Bounds, _Bounds | None]) -> Array:
    (q_position, q_segment), (k_position, k_segment) = q, k
    seen = ~empty(mask, _ends(q_position), _ends(k_position))
    if q_segment is None or k_segment is None:
        return seen
    real = (q_segment.high >= 0) & (k_segment.high >= 0)
    return seen & real & (q_segment.low <= k_segment.high) & (k_segment.low <= q_segment.high)


def _ends(bounds: _Bounds) -> Run:
    """A run with these ends, which are all that static masks read of it."""
    return Run(bounds.low, bounds.high - bounds.low, 2)


def _bounds(side: Side, axis: int) -> tuple[_Bounds, _Bounds | None]:
    """Those of every block's positions and segments, with a new dimension at ``axis`` for the other side's blocks."""
    position, segment = (
        None if x is None else _Bounds(jnp.expand_dims(x.min(2), axis), jnp.expand_dims(x.max(2), axis)) for x in side
    )
    assert position is not None
    return position, segment


def starts(pair: Pair) -> Array:
    """int32 ``[q runs + k runs + 2]``: the first positions of the runs of queries and of keys, and the global indices of the first
    batch entry and head."""
    origin = pair.extras.origin
    return _numbers([*(run.start for run in (*pair.q_runs, *pair.k_runs)), *([0, 0] if origin is None else [origin[0], origin[1]])])


def index(runs: Runs) -> Array:
    """``[length]``: the indices of a shard's rows in the whole sequence."""
    firsts = _numbers([run.start for run in runs])
    return (firsts[:, None] + runs[0].stride * jnp.arange(runs[0].length, dtype=jnp.int32)).reshape(-1)


def positions(ids: Array | None, runs: Runs) -> Array:
    """``[batch|1, length]``: the ids, or the indices if there are no ids."""
    return index(runs)[None] if ids is None else ids


def scaled(scores: Scores, x: Array) -> tuple[Array, Array | None]:
    """The logits from the products ``x = q . k``, scaled and soft-capped, and the soft cap's tanh (or None) for the gradient."""
    x, tanh = x * scores.scale, None
    if scores.softcap is not None:
        tanh = jnp.tanh(x / scores.softcap)
        x = tanh * scores.softcap
    return x, tanh


def distance(mask: Mask, q_pos: Array, k_pos: Array, dtype: DTypeLike) -> Array:
    """``|q - k|`` of positions, which broadcast, in a floating ``dtype``."""
    if not mask.any_position:
        return jnp.abs(q_pos - k_pos).astype(dtype)
    between = (jnp.maximum(q_pos, k_pos) - jnp.minimum(q_pos, k_pos)).astype(dtype)
    return jnp.where(between < 0, between + 2.0**32, between)  # a difference that overflows int32 wraps to a negative number


def in_blocks(x: Array, axis: int, where: BlockLayout, fill: float | None = None) -> Array:
    """Pads the axis, ``runs * length`` long, so that every run is whole blocks; ``fill`` None: with each run's last value."""
    axis %= x.ndim
    if where.even:
        return x
    x = x.reshape(*x.shape[:axis], where.runs, where.length, *x.shape[axis + 1 :])
    pad = [(0, 0)] * x.ndim
    pad[axis + 1] = (0, where.blocks_per_run * where.block - where.length)
    x = jnp.pad(x, pad, mode="edge") if fill is None else jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def out_of_blocks(x: Array, axis: int, where: BlockLayout) -> Array:
    """Undoes :func:`in_blocks`."""
    axis %= x.ndim
    if where.even:
        return x
    x = x.reshape(*x.shape[:axis], where.runs, -1, *x.shape[axis + 1 :])
    x = jax.lax.slice_in_dim(x, 0, where.length, axis=axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def same_rows(a: Array | None, b: Array | None) -> tuple[Array | None, Array | None]:
    """Ids of both sides, broadcast to the same number of rows."""
    if a is None or b is None:
        return None, None
    rows = max(a.shape[0], b.shape[0])
    return jnp.broadcast_to(a, (rows, a.shape[1])), jnp.broadcast_to(b, (rows, b.shape[1]))


def dense_mask(pair: Pair, predicates: list[tuple[Predicate, tuple[Array | np.ndarray, ...]]]) -> Array | None:
    """bool ``[batch|1, heads|1, query rows|1, key rows]``: the boolean mask and ``predicates``, those of the
    pair or some of them, combined; None if there are none."""
    extras, axes = pair.extras, pair.axes
    seen = extras.mask
    places = index(pair.q_runs)[None], index(pair.k_runs)[None]
    at = positions(extras.q_position_ids, pair.q_runs), positions(extras.kv_position_ids, pair.k_runs)
    for predicate, arrays in predicates:
        over = at if predicate.over == "position" else places
        table = _evaluate(predicate, arrays, pair.q.shape, extras.origin, *over, axes)
        seen = table if seen is None else seen & table
    return seen


WORD = 32


def mask_in_blocks(seen: Array, q: BlockLayout, k: BlockLayout) -> Array:
    """Bool ``[..., rows|1, keys]`` in whole blocks of both sides, padding hidden."""
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], q.runs * q.length, seen.shape[3]))
    return in_blocks(in_blocks(seen, 3, k, False), 2, q, False)


def packed_bits(seen: Array) -> Array:
    """bool ``[..., n]`` -> int32 ``[..., n / 32]``, the lowest bit first."""
    words = seen.reshape(*seen.shape[:-1], -1, WORD)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
    packed = jnp.sum(jnp.where(words, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(packed, jnp.int32)


def _numbers(numbers: Sequence) -> Array:
    return jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])


def _in_rows(ids: Array, where: BlockLayout) -> Array:
    """``[rows, length] -> [rows, blocks, block]``"""
    return in_blocks(ids, 1, where).reshape(ids.shape[0], where.blocks, where.block)


def _whole_blocks(where: BlockLayout) -> Array:
    last = jnp.arange(where.blocks) % where.blocks_per_run == where.blocks_per_run - 1
    return where.even | ~last


def _evaluate(
    predicate: Predicate,
    arrays: tuple[Array | np.ndarray, ...],
    shape: tuple[int, ...],
    origin: Array | None,
    q_at: Array,
    k_at: Array,
    axes: frozenset[str],
) -> Array:
    """``[batch|1, heads|1, query rows, key rows]``: computed once for all batch entries or heads if it depends on none."""
    on_batch, on_head = depends_on(predicate, arrays, axes)
    batch = shape[0] if on_batch or max(q_at.shape[0], k_at.shape[0]) > 1 else 1
    heads = shape[2] if on_head else 1
    batch0, head0 = (0, 0) if origin is None else (origin[0], origin[1])
    q_at, k_at = (jnp.broadcast_to(at, (batch, at.shape[1])) for at in (q_at, k_at))
    function = partial(predicate.apply, arrays)
    for mapped in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, 0)):
        function = jax.vmap(function, mapped)
    where = batch0 + jnp.arange(batch, dtype=jnp.int32), head0 + jnp.arange(heads, dtype=jnp.int32), q_at, k_at
    return function(*vary(where, axes))
