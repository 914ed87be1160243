"""Exchanges between all ranks at once: everyone gets everything, or its block from everyone.

On a CPU everything is packed into one buffer, for the reason that ``transfer`` gives: collectives that start together may run in a
different order on each device.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_core.masks.layout import Layout, inverse_permutation, permutation, run_length
from jax_core.options import AxisName
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.transfers.transfer import collective, pack, unpack, word_of

Tree = TypeVar("Tree")


def gather(spec: RingSpec, tree: Tree) -> Tree:
    """Each array with a new first dimension, the ranks."""
    if spec.axis_name is None:
        return jax.tree.map(lambda x: x[None], tree)
    word = word_of(spec, tree)
    if word is None:
        return jax.tree.map(lambda x: lax.all_gather(x, spec.axis_name), tree)
    words = collective(partial(lax.all_gather, axis_name=spec.axis_name), pack(tree, word))
    return jax.vmap(lambda buffer: unpack(buffer, tree))(words)


def all_to_all(spec: RingSpec, tree: Tree, axis_name: AxisName) -> Tree:
    """Of arrays ``[ranks, ...]``, block ``i`` goes to rank ``i`` of the axis; in the result it is the one that came from there.
    ``axis_name``: None for a single rank."""
    if axis_name is None:
        return tree
    word = word_of(spec, tree)
    if word is None:
        return jax.tree.map(lambda x: lax.all_to_all(x, axis_name, 0, 0), tree)
    words = jax.vmap(lambda block: pack(block, word))(tree)
    block = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    arrived = collective(partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0), words)
    return jax.vmap(lambda buffer: unpack(buffer, block))(arrived)


def in_sequence_order(x: Array, layout: Layout) -> Array:
    """Shards ``[ranks, batch, length, ...]`` as the whole sequence, ``[batch, ranks * length, ...]``."""
    ranks, batch, length, *rest = x.shape
    if layout == "striped":
        return jnp.moveaxis(x, 0, 2).reshape(batch, -1, *rest)
    if layout == "zigzag":
        halves = x.reshape(ranks, batch, 2, length // 2, *rest)
        x = jnp.concatenate([halves[:, :, 0], jnp.flip(halves[:, :, 1], 0)])
    whole = jnp.moveaxis(x, 0, 1).reshape(batch, -1, *rest)
    return whole if isinstance(layout, str) else _by_pieces(whole, layout, ranks, inverse_permutation)


def _by_pieces(x: Array, layout: Layout, ranks: int, order: Callable[..., list[int]]) -> Array:
    """``x [batch, positions, ...]`` in another order: whole runs at a time where they stay together, as in plans."""
    batch, length, *rest = x.shape
    run = run_length(layout, ranks, length // ranks)
    places = np.array(order(layout, ranks, length)).reshape(-1, run)
    if (places[:, 0] % run).any() or (np.diff(places) != 1).any():
        return x[:, jnp.asarray(places.reshape(-1))]
    return x.reshape(batch, -1, run, *rest)[:, jnp.asarray(places[:, 0] // run)].reshape(x.shape)


def in_shards(x: Array, layout: Layout, ranks: int) -> Array:
    """Undoes :func:`in_sequence_order`."""
    batch, _, *rest = x.shape
    if layout == "striped":
        return jnp.moveaxis(x.reshape(batch, -1, ranks, *rest), 2, 0)
    if layout == "zigzag":
        chunks = jnp.moveaxis(x.reshape(batch, 2 * ranks, -1, *rest), 1, 0)
        return jnp.concatenate([chunks[:ranks], jnp.flip(chunks[ranks:], 0)], axis=2)
    x = x if isinstance(layout, str) else _by_pieces(x, layout, ranks, permutation)
    return jnp.moveaxis(x.reshape(batch, ranks, -1, *rest), 1, 0)
