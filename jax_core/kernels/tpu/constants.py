"""What the Pallas kernels are compiled for, and the arrays they take.

Arrays are ``[batch, heads, length, dim]``, with every run padded to whole blocks; per-query and per-key values are
``[batch|1, (heads|1,) 1, length]``.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.blocks import BlockLayout, block_layout, dense_mask, in_blocks, same_rows, starts
from jax_core.kernels.contract import Pair, Scores
from jax_core.masks.functions import Predicate


@dataclass(frozen=True)
class TileConstants:
    """Everything static about a launch. ``in_kernel``: the mask functions that the kernel computes itself."""

    q: BlockLayout
    k: BlockLayout
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scores: Scores
    in_kernel: tuple[Predicate, ...]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def origin(self) -> int:
        """Where the first batch entry is among the scalars."""
        return self.q.runs + self.k.runs


T = TypeVar("T")  # an array, a reference to its block inside a kernel, or its BlockSpec


class Shards(NamedTuple, Generic[T]):
    """The large arrays of a pair of shards; ``dout``, ``lse`` and ``delta`` only in the backward."""

    q: T
    k: T
    v: T
    dout: T | None = None
    lse: T | None = None
    delta: T | None = None


class BlockedExtras(NamedTuple, Generic[T]):
    """The contract's extras as the kernels take them; each may be None: ids ``[batch|1, 1, length]``, ``bias`` and ``mask`` (int8)
    ``[batch|1, heads|1, rows|1, keys]``, ``slopes`` float32 ``[1, batch|1 * heads]``."""

    q_segments: T | None
    k_segments: T | None
    q_positions: T | None
    k_positions: T | None
    bias: T | None
    mask: T | None
    slopes: T | None


def make_constants(pair: Pair, blocks: tuple[int, int]) -> TileConstants:
    (q, k, v), scores = pair.shards, pair.scores
    return TileConstants(
        q=block_layout(pair.q_runs, blocks[0]),
        k=block_layout(pair.k_runs, blocks[1]),
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        scores=scores,
        in_kernel=tuple(predicate for predicate in scores.predicates if predicate.elementwise),
    )


def blocked_rows(x: Array, layout: BlockLayout) -> Array:
    """``[batch, length, heads, dim] -> [batch, heads, length in blocks, dim]``"""
    return in_blocks(jnp.swapaxes(x, 1, 2), 2, layout, 0)


def blocked_statistics(x: Array, layout: BlockLayout, fill: float = 0) -> Array:
    """``[batch, heads, length] -> [batch, heads, 1, length in blocks]``"""
    return in_blocks(x, 2, layout, fill)[:, :, None]


def block_extras(const: TileConstants, pair: Pair) -> BlockedExtras[Array]:
    extras = pair.extras
    segments = same_rows(extras.q_segment_ids, extras.kv_segment_ids)
    positions = same_rows(extras.q_position_ids, extras.kv_position_ids)
    mask = dense_mask(pair, [(predicate, arrays) for predicate, arrays in pair.predicates if not predicate.elementwise])
    slopes = extras.alibi_slopes
    return BlockedExtras(
        _ids(segments[0], const.q),
        _ids(segments[1], const.k),
        _ids(positions[0], const.q),
        _ids(positions[1], const.k),
        _tiles(_on_tpu(extras.bias), const),
        _mask_tiles(mask, const),
        None if slopes is None else slopes.astype(jnp.float32).reshape(1, -1),
    )


def _on_tpu(bias: Array | None) -> Array | None:
    """A TPU has no float16."""
    return bias.astype(jnp.float32) if bias is not None and bias.dtype == jnp.float16 else bias


def _ids(ids: Array | None, layout: BlockLayout) -> Array | None:
    return None if ids is None else in_blocks(ids, 1, layout)[:, None].astype(jnp.int32)


def _tiles(x: Array | None, const: TileConstants) -> Array | None:
    if x is None:
        return None
    x = in_blocks(x, 3, const.k, 0)
    return x if x.shape[2] == 1 else in_blocks(x, 2, const.q, 0)


def _mask_tiles(mask: Array | None, const: TileConstants) -> Array | None:
    tiles = _tiles(mask, const)
    return None if tiles is None else tiles.astype(jnp.int8)


def make_scalars(pair: Pair) -> Array:
    """int32 ``[q runs + k runs + 4]``: the first positions of the runs, the first batch entry and head, the dropout seed."""
    seed = jnp.zeros(2, jnp.uint32) if pair.extras.dropout_seed is None else pair.extras.dropout_seed
    words = lax.bitcast_convert_type(seed.astype(jnp.uint32), jnp.int32)
    return jnp.concatenate([starts(pair), words])


def quotient(x: Array, by: int) -> Array:
    """The quotient of numbers that are not negative; cheaper than ``//``."""
    return lax.div(x, x.dtype.type(by))


def remainder(x: Array, by: int) -> Array:
    return lax.rem(x, x.dtype.type(by))
