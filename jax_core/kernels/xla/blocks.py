"""Cuts two shards into blocks for the XLA kernel, and joins the results.

Names of dimensions in comments: n/m query and key blocks, b batch, h key/value heads, g query heads of a group, q and k positions
in a block, d dim.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_core.config import FwdParams
from jax_core.kernels.blocks import Side, any_visible, index
from jax_core.kernels.contract import Pair, Runs, Scores
from jax_core.varying import vary


class BlockPositions(NamedTuple):
    """What the masks need to know about one side's positions, in blocks."""

    place: Array  # [n, q] index in the whole sequence
    position: Array  # [n, b|1, q], equal to place unless position ids replace it
    segment: Array | None  # [n, b|1, q]
    real: Array | None  # [n, q] False on the padding of a block, or None without padding


class Queries(NamedTuple):
    q: Array  # [n, b, h, g, q, d]
    at: BlockPositions


class Keys(NamedTuple):
    k: Array  # [m, b, h, k, d]
    v: Array
    at: BlockPositions


class Tiles(NamedTuple):
    """Arrays for each pair of blocks, ``[n, m, ...]``."""

    needed: Array  # bool
    bias: Array | None  # [n, m, b|1, h|1, g|1, q|1, k]
    mask: Array | None


class Uncut(NamedTuple):
    """Operands that are not cut into blocks."""

    slopes: Array | None  # [b|1, h, g, 1, 1]
    seed: Array | None
    batch: Array  # [b] global indices
    head: Array  # [h, g] global indices
    predicate_arrays: tuple[tuple[Array | np.ndarray, ...], ...]


def cut(pair: Pair, config: FwdParams) -> tuple[Queries, Keys, Tiles, Uncut]:
    (q, k, v), q_runs, k_runs, extras = pair.shards, pair.q_runs, pair.k_runs, pair.extras
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    q_size, k_size = _block_size(q_runs, config.q_blocksize), _block_size(k_runs, config.kv_blocksize)
    q_at = _positions(q_runs, q_size, extras.q_position_ids, extras.q_segment_ids)
    k_at = _positions(k_runs, k_size, extras.kv_position_ids, extras.kv_segment_ids)
    blocks = q_at.place.shape[0]
    tiles = Tiles(
        ~_empty(pair.scores, q_at, k_at),
        split_tiles(extras.bias, kv_heads, group, q_size, k_size, blocks),
        split_tiles(extras.mask, kv_heads, group, q_size, k_size, blocks),
    )
    batch0, head0 = (0, 0) if extras.origin is None else (extras.origin[0], extras.origin[1])
    slopes = extras.alibi_slopes
    uncut = Uncut(
        None if slopes is None else slopes.reshape(-1, kv_heads, group, 1, 1),
        extras.dropout_seed,
        batch0 + jnp.arange(q.shape[0], dtype=jnp.int32),
        head0 + jnp.arange(q.shape[2], dtype=jnp.int32).reshape(kv_heads, group),
        (),
    )
    queries = Queries(split_rows(q, kv_heads, q_size), q_at)
    keys = Keys(split_keys(k, k_size), split_keys(v, k_size), k_at)
    # Every value gets the same type under shard_map's check_vma, so that loops and branches agree.
    queries, keys, tiles, uncut = vary((queries, keys, tiles, uncut), pair.axes)
    return queries, keys, tiles, uncut._replace(predicate_arrays=extras.predicate_arrays)


def _block_size(runs: Runs, wanted: int | None) -> int:
    assert wanted is not None
    return min(wanted, runs[0].length)


def _positions(runs: Runs, size: int, position_ids: Array | None, segment_ids: Array | None) -> BlockPositions:
    at = index(runs)
    length = at.shape[0]
    position = at[None] if position_ids is None else position_ids
    real = None if length % size == 0 else _split(jnp.arange(length) >= 0, 0, size, False)
    segment = None if segment_ids is None else _split(segment_ids, 1, size)
    return BlockPositions(_split(at, 0, size), _split(position, 1, size), segment, real)


def _empty(scores: Scores, q: BlockPositions, k: BlockPositions) -> Array:
    """``[n, m]``: whether positions and segments show that a pair of blocks has no visible pair in any batch entry."""
    queries, keys = (
        Side(jnp.swapaxes(side.position, 0, 1), None if side.segment is None else jnp.swapaxes(side.segment, 0, 1))
        for side in (q, k)
    )
    none = ~any_visible(scores.mask, queries, keys).any(0)
    return jnp.broadcast_to(none, (q.place.shape[0], k.place.shape[0]))


def _split(x: Array, axis: int, size: int, fill: float | None = None) -> Array:
    """Cuts ``axis`` into blocks of ``size``, which become the leading axis; pads the last (``fill`` None: with its last value)."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, mode="edge") if fill is None else jnp.pad(x, pad, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def split_rows(x: Array, kv_heads: int, size: int) -> Array:
    """``[b, length, h*g, d] -> [n, b, h, g, q, d]``"""
    blocks = _split(x, 1, size, 0)
    n, b, q, heads, d = blocks.shape
    return blocks.reshape(n, b, q, kv_heads, heads // kv_heads, d).transpose(0, 1, 3, 4, 2, 5)


def join_rows(blocks: Array, length: int) -> Array:
    n, b, h, g, q, d = blocks.shape
    return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * q, h * g, d)[:, :length]


def split_heads(x: Array, kv_heads: int, size: int, fill: float) -> Array:
    """``[b, h*g, length] -> [n, b, h, g, q]``"""
    blocks = _split(x, 2, size, fill)
    n, b, heads, q = blocks.shape
    return blocks.reshape(n, b, kv_heads, heads // kv_heads, q)


def join_heads(blocks: Array, length: int) -> Array:
    n, b, h, g, q = blocks.shape
    return blocks.transpose(1, 2, 3, 0, 4).reshape(b, h * g, n * q)[..., :length]


def split_keys(x: Array, size: int) -> Array:
    """``[b, length, h, d] -> [m, b, h, k, d]``"""
    return jnp.swapaxes(_split(x, 1, size, 0), 2, 3)


def join_keys(blocks: Array, length: int) -> Array:
    m, b, h, k, d = blocks.shape
    return blocks.transpose(1, 0, 3, 2, 4).reshape(b, m * k, h, d)[:, :length]


def split_tiles(x: Array | None, kv_heads: int, group: int, q_size: int, k_size: int, blocks: int) -> Array | None:
    """``[b|1, h*g|1, q_length|1, k_length] -> [n, m, b|1, h|1, g|1, q|1, k]`` with ``blocks`` query blocks."""
    if x is None:
        return None
    columns = _split(x, 3, k_size, 0)
    tiles = _split(columns, 3, q_size, 0) if x.shape[2] != 1 else jnp.broadcast_to(columns[None], (blocks, *columns.shape))
    heads = (kv_heads, group) if x.shape[1] != 1 else (1, 1)
    return tiles.reshape(*tiles.shape[:3], *heads, *tiles.shape[4:])


def join_tiles(tiles: Array, shape: tuple[int, ...]) -> Array:
    """``[m, n, b|1, h|1, g|1, q|1, k]`` back to ``shape``, summed over the query blocks if they share a row."""
    if shape[2] == 1:
        tiles = tiles.sum(1, keepdims=True)
    m, n, b, h, g, q, k = tiles.shape
    return tiles.transpose(2, 3, 4, 1, 5, 0, 6).reshape(b, h * g, n * q, m * k)[..., : shape[2], : shape[3]]
