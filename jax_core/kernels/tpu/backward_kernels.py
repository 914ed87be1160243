"""The backward kernels: they recompute the scores, and from them dQ, or dK and dV, or all in one sweep, or the bias gradient.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691): each sum has one writer, so every run gives the same bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu.constants import BlockedExtras, Shards, TileConstants
from jax_core.kernels.tpu.schedule import FIRST, LAST, update_if_visible, visit
from jax_core.kernels.tpu.scores import Tile, TileIndex, column, dropped, logit_gradient, make_tile, product
from jax_core.kernels.tpu.specs import Place


class _Gradients(NamedTuple):
    """A tile's weights, and the gradients of its logits and of ``q . k``; transposed like the tile."""

    tile: Tile
    weights: Array
    dlogits: Array
    dproducts: Array


def _gradients(
    const: TileConstants, at: TileIndex, shards: Shards[Ref], blocked: BlockedExtras[Ref], masked: bool, transposed: bool
) -> _Gradients:
    assert shards.dout is not None and shards.lse is not None and shards.delta is not None
    tile = make_tile(const, at, shards.q[...], shards.k[...], blocked, masked, transposed)
    lse, delta = (x[...] if transposed else column(x[...]) for x in (shards.lse, shards.delta))
    weights = jnp.exp(tile.logits - lse)
    dout, value = shards.dout[...], shards.v[...]
    dweights = product(value, dout, (1, 1), const.scores) if transposed else product(dout, value, (1, 1), const.scores)
    return _Gradients(tile, weights, *logit_gradient(const, tile, weights, dweights, delta))


def queries_kernel(
    const: TileConstants,
    size: tuple[int, int],
    words: Ref,
    scalars: Ref,
    shards: Shards[Ref],
    blocked: BlockedExtras[Ref],
    before: Ref | None,
    dq: Ref,
    sum_dq: Ref,
) -> None:
    """dQ of a block of queries, added to ``before``, the dQ so far (may be None)."""
    batch, head, number = (pl.program_id(axis) for axis in range(3))
    q, k, flags = visit(const, size, words, batch, number)
    at = TileIndex(batch, head, q, k, scalars)

    @pl.when(flags & FIRST != 0)
    def start() -> None:
        sum_dq[...] = jnp.zeros_like(sum_dq) if before is None else before[...]

    def update(masked: bool) -> None:
        tile_grads = _gradients(const, at, shards, blocked, masked, transposed=False)
        key = shards.k[...]
        sum_dq[...] += product(tile_grads.dproducts.astype(key.dtype), key, (1, 0), const.scores)

    update_if_visible(flags, update)

    @pl.when(flags & LAST != 0)
    def finish() -> None:
        dq[...] = sum_dq[...]


class _Sums(NamedTuple):
    """In VMEM, float32: ``[k, dim]`` and ``[k, value_dim]`` for a block of keys; ``[group, 1, q]`` for a group's heads."""

    dk: Ref
    dv: Ref
    dslopes: Ref


def keys_kernel(
    const: TileConstants,
    size: tuple[int, int],
    words: Ref,
    scalars: Ref,
    shards: Shards[Ref],
    blocked: BlockedExtras[Ref],
    before: Ref | None,
    dk: Ref,
    dv: Ref,
    dslopes: Ref | None,
    dq: Ref | None,
    *scratch: Ref,
) -> None:
    """dK and dV of a block of keys, summed over the query heads of their group, and the slopes' gradients (None without slopes).

    ``dq`` is None, or in a fused backward the whole dQ in HBM, in the buffer of ``before``; visits add to its blocks.
    """
    del before
    batch, kv_head, number, member = (pl.program_id(axis) for axis in range(4))
    q, k, flags = visit(const, size, words, batch, number)
    at = TileIndex(batch, kv_head * const.group + member, q, k, scalars)
    sums = _Sums(*scratch[:3])

    @pl.when((flags & FIRST != 0) & (member == 0))
    def start() -> None:
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def update(masked: bool) -> None:
        tile_grads = _gradients(const, at, shards, blocked, masked, transposed=True)
        assert shards.dout is not None
        query, dout = shards.q[...], shards.dout[...]
        dproducts = tile_grads.dproducts.astype(query.dtype)
        sums.dk[...] += product(dproducts, query, (1, 0), const.scores)
        sums.dv[...] += product(dropped(const, tile_grads.tile, tile_grads.weights).astype(dout.dtype), dout, (1, 0), const.scores)
        if tile_grads.tile.distance is not None:
            sums.dslopes[member] -= (tile_grads.dlogits * tile_grads.tile.distance).sum(0, keepdims=True)
        if dq is not None:
            rows = dq.at[batch, at.head, pl.ds(q * const.q.block, const.q.block)]
            _add_block(rows, dproducts, shards.k[...], const, *scratch[3:])

    update_if_visible(flags, update)

    @pl.when((flags & LAST != 0) & (member == const.group - 1))
    def finish() -> None:
        dk[...], dv[...] = sums.dk[...], sums.dv[...]
        if dslopes is not None:
            dslopes[...] = sums.dslopes[:, 0]


def _add_block(dq: Ref, dproducts: Array, key: Array, const: TileConstants, block: Ref, arrived: Ref, left: Ref) -> None:
    """Adds a transposed tile's share to a block of dQ. Waits for the copy back: the next visit may be to the same block."""
    copy_in, copy_out = pltpu.make_async_copy(dq, block, arrived), pltpu.make_async_copy(block, dq, left)
    copy_in.start()
    share = product(dproducts, key, (0, 0), const.scores)
    copy_in.wait()
    block[...] += share
    copy_out.start()
    copy_out.wait()


def bias_kernel(
    const: TileConstants,
    place: Callable[..., Place],
    pair_flags: Ref,
    scalars: Ref,
    shards: Shards[Ref],
    blocked: BlockedExtras[Ref],
    dbias: Ref,
    total: Ref,
) -> None:
    """The gradient of a tile of the bias, summed over all score tiles that share it (the last grid axis)."""
    number, count = pl.program_id(4), pl.num_programs(4)
    batch, head, q, k = place(*(pl.program_id(axis) for axis in range(5)))
    at = TileIndex(batch, head, q, k, scalars)
    pairs = const.q.blocks * const.k.blocks
    flags = pair_flags[(batch * pairs if pair_flags.shape[0] > pairs else 0) + q * const.k.blocks + k]

    @pl.when(number == 0)
    def start() -> None:
        total[...] = jnp.zeros_like(total)

    def update(masked: bool) -> None:
        tile_grads = _gradients(const, at, shards, blocked, masked, transposed=False)
        total[...] += tile_grads.dlogits.sum(0, keepdims=True) if total.shape[0] == 1 else tile_grads.dlogits

    update_if_visible(flags, update)

    @pl.when(number == count - 1)
    def finish() -> None:
        dbias[...] = total[...]
