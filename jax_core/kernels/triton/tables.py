"""What the kernels need of data-dependent masks: packed bits, and for every block the list of blocks that it has to visit.

Made by XLA before a launch. Only a call with segment ids, position ids, a boolean mask or a mask function needs them; otherwise a
kernel works out its blocks by itself.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_core.block import Extras, Scores
from jax_core.config import FwdParams
from jax_core.kernels.triton import launch
from jax_core.kernels.triton.plan import Side, side
from jax_core.layout import Run
from jax_core.mask import empty, full
from jax_core.predicate import Predicate, depends_on
from jax_core.varying import vary, varying_axes

_WORD = 32


class Tables(NamedTuple):
    """``bits``: int32 ``[batch|1, heads|1, query rows, key rows / 32]``, rows counted in whole blocks, or None. ``visible``,
    ``whole``: ``[batch|1, heads|1, query blocks, key blocks]``, which pairs of blocks have a visible pair, and which are visible
    altogether; or None where no data decides it."""

    bits: Any
    visible: Any
    whole: Any

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a plan that come from here."""
        bits = (0, 0) if self.bits is None else self.bits.shape[:2]
        table = (1, 1) if self.visible is None else self.visible.shape[:2]
        settings = dict(bits_batch=bits[0], bits_heads=bits[1], table_batch=table[0], table_heads=table[1])
        return settings | dict(table=self.visible is not None)

    def lists(self, of_keys: bool) -> tuple[Any, Any]:
        """``(order, counts)``: for each block the blocks of the other side to visit, first those visible altogether (the first of
        its counts), then those in part (the second)."""
        if self.visible is None:
            return None, None
        visible, whole = (x if of_keys else jnp.swapaxes(x, -1, -2) for x in (self.visible, self.whole))
        return list_blocks(jnp.where(visible, jnp.where(whole, 0, 1), 2).astype(jnp.int32))


@dataclass(frozen=True)
class ListsPlan:
    """What the kernel that makes the lists is compiled for."""

    columns: int
    block: int


def list_blocks(kinds):
    """``kinds [..., rows, columns]`` of pairs of blocks -> ``order [..., rows, columns + 1]``, ``counts [..., rows, 2]``
    (``lists_kernel``)."""
    from jax_core.kernels.triton.lists_kernel import lists_kernel

    *rows, columns = kinds.shape
    plan = ListsPlan(columns, min(1024, 1 << (columns - 1).bit_length()))
    results = [jax.ShapeDtypeStruct((*rows, length), jnp.int32) for length in (columns + 1, 2)]
    params = FwdParams(num_stages=1, num_warps=4)
    return launch.launch(lists_kernel, [kinds], [], results, plan=plan, grid=(math.prod(rows),), params=params)


def make_tables(shards, q_runs, k_runs, scores: Scores, extras: Extras, blocks: tuple[int, int]) -> Tables:
    """``shards``: q, k, v. ``blocks``: of queries and keys."""
    if extras.q_segment_ids is None and extras.q_position_ids is None and extras.mask is None and not scores.predicates:
        return Tables(None, None, None)
    q, k = side(q_runs, blocks[0]), side(k_runs, blocks[1])
    q_low, q_high = _bounds(_positions(extras.q_position_ids, q_runs), q)
    k_low, k_high = _bounds(_positions(extras.kv_position_ids, k_runs), k)
    q_bounds = Run(q_low[:, :, None], (q_high - q_low)[:, :, None], 2)  # by its ends
    k_bounds = Run(k_low[:, None, :], (k_high - k_low)[:, None, :], 2)
    visible, whole = ~empty(scores.mask, q_bounds, k_bounds), full(scores.mask, q_bounds, k_bounds)
    if extras.q_segment_ids is not None:
        (a, b), (c, d) = _bounds(extras.q_segment_ids, q), _bounds(extras.kv_segment_ids, k)
        a, b, c, d = a[:, :, None], b[:, :, None], c[:, None, :], d[:, None, :]
        visible = visible & (b >= 0) & (d >= 0) & (a <= d) & (c <= b)
        whole = whole & (a == b) & (c == d) & (a == c) & (a >= 0)
    whole = whole & (_whole_blocks(q)[:, None] & _whole_blocks(k)[None, :])
    visible, whole = visible[:, None], whole[:, None]
    bits = _bits(shards, q_runs, k_runs, q, k, scores, extras)
    if bits is not None:
        tiles = bits.reshape(*bits.shape[:2], q.blocks, q.block, k.blocks, k.block // _WORD)
        visible = visible & (tiles != 0).any((3, 5))
        whole = whole & (tiles == -1).all((3, 5))
    visible, whole = jnp.broadcast_arrays(visible, whole)
    return Tables(bits, visible, whole & visible)


def index(runs: tuple[Run, ...]):
    """``[length]``: the places of a shard's rows in the whole sequence."""
    return jnp.concatenate([run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32) for run in runs])


def _positions(ids, runs):
    return index(runs)[None] if ids is None else ids


def _in_blocks(x, axis: int, where: Side, fill=None):
    """The axis, ``runs * length`` long, filled up so that every run is whole blocks; None: with each run's last value."""
    axis %= x.ndim
    if where.even:
        return x
    x = x.reshape(*x.shape[:axis], where.runs, where.length, *x.shape[axis + 1 :])
    pad = [(0, 0)] * x.ndim
    pad[axis + 1] = (0, where.blocks_per_run * where.block - where.length)
    x = jnp.pad(x, pad, mode="edge") if fill is None else jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _bounds(ids, where: Side):
    """``[rows, length]`` ids -> the least and the greatest of every block, ``[rows, blocks]`` each."""
    blocks = _in_blocks(ids, 1, where).reshape(ids.shape[0], where.blocks, where.block)
    return blocks.min(-1), blocks.max(-1)


def _whole_blocks(where: Side):
    last = jnp.arange(where.blocks) % where.blocks_per_run == where.blocks_per_run - 1
    return where.even | ~last


def _bits(shards, q_runs, k_runs, q: Side, k: Side, scores: Scores, extras: Extras):
    seen = extras.mask
    axes = varying_axes(shards, extras, [run.start for run in (*q_runs, *k_runs)])
    places = index(q_runs)[None], index(k_runs)[None]
    positions = _positions(extras.q_position_ids, q_runs), _positions(extras.kv_position_ids, k_runs)
    for predicate, arrays in zip(scores.predicates, extras.predicate_arrays, strict=True):
        over = positions if predicate.over == "position" else places
        table = _evaluate(predicate, arrays, shards[0].shape, extras.origin, *over, axes)
        seen = table if seen is None else seen & table
    if seen is None:
        return None
    length = q.runs * q.length
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], length, seen.shape[3]))
    seen = _in_blocks(_in_blocks(seen, 3, k, False), 2, q, False)
    words = seen.reshape(*seen.shape[:3], -1, _WORD)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(_WORD, dtype=jnp.uint32))
    packed = jnp.sum(jnp.where(words, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(packed, jnp.int32)


def _evaluate(predicate: Predicate, arrays, shape, origin, q_at, k_at, axes):
    """``[batch|1, heads|1, query rows, key rows]``: entries and heads that the predicate does not tell apart are computed once."""
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
