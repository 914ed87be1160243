"""The backward kernels: the scores again, and from them dQ, or dK and dV, or all in one sweep, and the gradient of a bias.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691): each sum has one writer, so every run gives the same bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu.constants import TileConstants
from jax_core.kernels.tpu.products import column, product
from jax_core.kernels.tpu.scores import Tile, TileIndex, dropped, logit_gradient, make_tile
from jax_core.kernels.tpu.visits import FIRST, LAST, update_if_visible, visit


class _Gradients(NamedTuple):
    """A tile's weights, and the gradients of its logits and of the products of queries and keys; transposed or not as the tile."""

    tile: Tile
    weights: Any
    dlogits: Any
    dproducts: Any


def _gradients(const: TileConstants, at: TileIndex, shards, blocked, masked: bool, transposed: bool) -> _Gradients:
    tile = make_tile(const, at, shards.q[...], shards.k[...], blocked, masked, transposed)
    lse, delta = (x[...] if transposed else column(x[...]) for x in (shards.lse, shards.delta))
    weights = jnp.exp(tile.logits - lse)
    dout, value = shards.dout[...], shards.v[...]
    dweights = product(value, dout, (1, 1), const.scores) if transposed else product(dout, value, (1, 1), const.scores)
    return _Gradients(tile, weights, *logit_gradient(const, tile, weights, dweights, delta))


def queries_kernel(const: TileConstants, size: tuple[int, int], words, scalars, shards, blocked, before, dq, sum_dq):
    """dQ of a block of queries, on top of what was ``before`` (may be None)."""
    batch, head, number = (pl.program_id(axis) for axis in range(3))
    q, k, flags = visit(const, size, words, batch, number)
    at = TileIndex(batch, head, q, k, scalars)

    @pl.when(flags & FIRST != 0)
    def start():
        sum_dq[...] = jnp.zeros_like(sum_dq) if before is None else before[...]

    def update(masked: bool) -> None:
        found = _gradients(const, at, shards, blocked, masked, transposed=False)
        key = shards.k[...]
        sum_dq[...] += product(found.dproducts.astype(key.dtype), key, (1, 0), const.scores)

    update_if_visible(flags, update)

    @pl.when(flags & LAST != 0)
    def finish():
        dq[...] = sum_dq[...]


class _Sums(NamedTuple):
    """In fast memory: of a block of keys ``[k, dim]`` and ``[k, value_dim]``; of a group's heads, by query, ``[group, 1, q]``."""

    dk: Any
    dv: Any
    dslopes: Any


def keys_kernel(
    const: TileConstants, size: tuple[int, int], words, scalars, shards, blocked, before, dk, dv, dslopes, dq, *scratch
):
    """dK and dV of a block of keys, summed over the query heads that share them, and the slopes' gradients (None without slopes).

    ``dq`` is None, or in a fused backward all of dQ in the large memory, in the place of ``before``; visits add to its blocks.
    """
    del before
    batch, kv_head, number, member = (pl.program_id(axis) for axis in range(4))
    q, k, flags = visit(const, size, words, batch, number)
    at = TileIndex(batch, kv_head * const.group + member, q, k, scalars)
    sums = _Sums(*scratch[:3])

    @pl.when((flags & FIRST != 0) & (member == 0))
    def start():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def update(masked: bool) -> None:
        found = _gradients(const, at, shards, blocked, masked, transposed=True)
        query, dout = shards.q[...], shards.dout[...]
        dproducts = found.dproducts.astype(query.dtype)
        sums.dk[...] += product(dproducts, query, (1, 0), const.scores)
        sums.dv[...] += product(dropped(const, found.tile, found.weights).astype(dout.dtype), dout, (1, 0), const.scores)
        if dslopes is not None:
            sums.dslopes[member] -= (found.dlogits * found.tile.distance).sum(0, keepdims=True)
        if dq is not None:
            _add_block(
                dq.at[batch, at.head, pl.ds(q * const.q.block, const.q.block)], dproducts, shards.k[...], const, *scratch[3:]
            )

    update_if_visible(flags, update)

    @pl.when((flags & LAST != 0) & (member == const.group - 1))
    def finish():
        dk[...], dv[...] = sums.dk[...], sums.dv[...]
        if dslopes is not None:
            dslopes[...] = sums.dslopes[:, 0]


def _add_block(place, dproducts, key, const: TileConstants, block, arrived, left) -> None:
    """Adds a transposed tile's share of dQ to ``place``. The copy back is waited for: the next visit may be to the same block."""
    copy_in, copy_out = pltpu.make_async_copy(place, block, arrived), pltpu.make_async_copy(block, place, left)
    copy_in.start()
    share = product(dproducts, key, (0, 0), const.scores)
    copy_in.wait()
    block[...] += share
    copy_out.start()
    copy_out.wait()


def bias_kernel(const: TileConstants, place, kinds, scalars, shards, blocked, dbias, total):
    """The gradient of a tile of the bias, summed over all that share it: the last grid axis. ``kinds``: flags of all pairs."""
    number, count = pl.program_id(4), pl.num_programs(4)
    batch, head, q, k = place(*(pl.program_id(axis) for axis in range(5)))
    at = TileIndex(batch, head, q, k, scalars)
    pairs = const.q.blocks * const.k.blocks
    flags = kinds[(batch * pairs if kinds.shape[0] > pairs else 0) + q * const.k.blocks + k]

    @pl.when(number == 0)
    def start():
        total[...] = jnp.zeros_like(total)

    def update(masked: bool) -> None:
        found = _gradients(const, at, shards, blocked, masked, transposed=False)
        total[...] += found.dlogits.sum(0, keepdims=True) if total.shape[0] == 1 else found.dlogits

    update_if_visible(flags, update)

    @pl.when(number == count - 1)
    def finish():
        dbias[...] = total[...]
