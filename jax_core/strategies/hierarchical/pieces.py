"""Arrays that travel in pieces, one with each step."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.strategies.transfers.transfer import Tree
from jax_core.varying import vary, varying_axes


def take_piece(tree: Tree, index: Array, count: int) -> Tree:
    """The piece ``index`` of ``count`` of each array. The last ones overlap where its length does not divide."""
    return tree if count == 1 else jax.tree.map(lambda x: _take(x, index, count), tree)


def put_piece(tree: Tree, piece: Tree, index: Array, count: int) -> Tree:
    """``tree`` with that piece replaced."""
    return piece if count == 1 else jax.tree.map(lambda x, part: _put(x, part, index), tree, piece)


def _take(x: Array, index: Array, count: int) -> Array:
    length = -(-x.shape[_longest(x)] // count)
    return lax.dynamic_slice_in_dim(x, index * length, length, _longest(x))


def _put(x: Array, part: Array, index: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, index * part.shape[_longest(x)], _longest(x))


def _longest(x: Array) -> int:
    return x.shape.index(max(x.shape))


def room_for(tree: Tree) -> Tree:
    """To be filled by :func:`put_piece`."""
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), varying_axes(x)), tree)
