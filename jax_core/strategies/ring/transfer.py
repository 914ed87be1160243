"""What travels round the ring together.

On a GPU only one collective is in flight at a time, so a second one would wait for the first; but XLA makes one of all permutations
that leave together. On a TPU those are all in flight at once. What arrives is used where it lies: on both a load is the arrays
themselves. On a CPU XLA runs them in an order of its own on each device, which ends in a deadlock: there a load is packed into a
single buffer of machine words. The words are unsigned integers, because a buffer of floats might be converted on the way, and
conversion does not keep bits that only look like floats.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def word_type(dtype, packed: bool) -> type | None:
    """The word that K/V of ``dtype`` travel in: as wide as their items, so that packing them is a plain copy; None unpacked."""
    if not packed:
        return None
    return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else jnp.uint32


def pack(tree, word):
    """All leaves of ``tree`` (arrays with items of 2, 4 or 8 bytes) as one 1-D array of words, bit for bit; as a tuple if ``word``
    is None."""
    if word is None:
        return tuple(jax.tree.leaves(tree))
    return jnp.concatenate([lax.bitcast_convert_type(leaf, word).reshape(-1) for leaf in jax.tree.leaves(tree)])


def unpack(words, like):
    """The inverse of :func:`pack`; ``like`` is a tree of the shapes and dtypes that were packed."""
    leaves, structure = jax.tree.flatten(like)
    if isinstance(words, tuple):
        return jax.tree.unflatten(structure, words)
    counts = [math.prod(leaf.shape) * leaf.dtype.itemsize // words.dtype.itemsize for leaf in leaves]
    return jax.tree.unflatten(structure, [_restore(*pair) for pair in zip(_cut(words, counts), leaves, strict=True)])


class Load(NamedTuple):
    """What :func:`pack` made, which travels ``hop`` ranks round the ring."""

    words: Any
    hop: int


def depart(loads: list[Load], axis_name, size: int) -> list:
    """Starts the loads on their way; :func:`land` gives them as they came from the ranks that sent them."""

    axes, places = _as_ppermute_counts(axis_name, size)

    def travel(words, hop: int):
        return lax.ppermute(words, axes, [(places[rank], places[(rank + hop) % size]) for rank in range(size)])

    if any(isinstance(load.words, tuple) for load in loads):
        return [travel(load.words, load.hop) for load in loads]
    arriving: list[jax.Array] = []
    for hop in _hops(loads):  # those with the same hop as one buffer
        words = jnp.concatenate(_same_hop(loads, hop))
        arriving.append(travel(after(words, arriving[-1]) if arriving else words, hop))
    return arriving


def _as_ppermute_counts(axis_name, size: int) -> tuple[Any, list[int]]:
    """The axes, and the place of every rank among them: ``lax.ppermute`` counts in the mesh's order of axes, ``lax.axis_index``,
    which gives the ranks, in the order named."""
    order = jax.sharding.get_abstract_mesh().axis_names
    if not isinstance(axis_name, tuple) or not set(axis_name) <= set(order):
        return axis_name, list(range(size))
    axes = tuple(sorted(axis_name, key=order.index))
    ranks = np.arange(size).reshape([lax.axis_size(name) for name in axis_name])
    return axes, np.argsort(ranks.transpose([axis_name.index(name) for name in axes]).reshape(-1)).tolist()


def land(arriving: list, loads: list[Load]) -> list:
    if any(isinstance(load.words, tuple) for load in loads):
        return arriving
    groups = {
        hop: iter(_cut(buffer, [words.size for words in _same_hop(loads, hop)]))
        for hop, buffer in zip(_hops(loads), arriving, strict=True)
    }
    return [next(groups[load.hop]) for load in loads]


def after(words, done: jax.Array):
    """``words``, not sent before ``done`` is computed: two rotations of one program must have an order.

    Without one XLA on CPU may take them in another order on each device, and wait for ever. It also drops optimization barriers,
    so a word depends on ``done`` in earnest: it is added what only we know to be 0, a test for NaNs that no arithmetic makes.
    """
    words, done = lax.optimization_barrier((words, done))
    if isinstance(words, tuple):
        return words
    bits = lax.bitcast_convert_type(done.reshape(-1)[:8], f"uint{8 * done.dtype.itemsize}")
    never = jnp.all(bits == jnp.array(_ODD_NAN[done.dtype.itemsize], bits.dtype))
    return words.at[0].add(never.astype(words.dtype))


# By the bytes of an item: a NaN of every floating type, also when the items are words of one.
_ODD_NAN = {2: 0x7FC1, 4: 0x7FC1_7FC1, 8: 0x7FC1_7FC1_7FC1_7FC1}


def _hops(loads: list[Load]) -> list[int]:
    return sorted({load.hop for load in loads})


def _same_hop(loads: list[Load], hop: int) -> list[jax.Array]:
    return [load.words for load in loads if load.hop == hop]


def _cut(words, counts: list[int]) -> list[jax.Array]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [words[start : start + count] for start, count in zip(starts, counts, strict=True)]


def _restore(words, leaf):
    # Bitcasts, not shifts of the bits: XLA on GPU loses the low halves of shifted words that travel (benchmarks/NOTES.md).
    per_item = leaf.dtype.itemsize // words.dtype.itemsize
    shape = leaf.shape if per_item == 1 else (*leaf.shape, per_item)
    return lax.bitcast_convert_type(words.reshape(shape), leaf.dtype)
