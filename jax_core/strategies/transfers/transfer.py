"""How K/V and their gradients are sent round the ring.

On a GPU only one collective is in flight at a time, so a second one would wait for the first; but XLA merges all permutations that
start together into one collective. On a TPU they are all in flight at once. On both, the receiver uses arrays in place, so they are
sent unpacked. On a CPU, XLA may run collectives in a different order on each device, which deadlocks: there everything that starts
together is packed into a single buffer of machine words. The words are unsigned integers, because a buffer of floats might be
converted on the way, and conversion does not preserve bits that are not really floats.

Words of integers have no derivatives. A pass that is to be differentiated (``spec.differentiable``) sends words that are floats,
wide enough for all floats among the arrays; what is not floating goes as halves of words, which are exact in them.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_core.options import AxisName
from jax_core.strategies.contract import RingSpec

Buffer = Array | tuple[Array, ...]  # packed words, or the arrays themselves
Tree = TypeVar("Tree")
Sent = TypeVar("Sent", bound=Buffer)


def wire_dtype(dtype: DTypeLike, packed: bool) -> type | None:
    """The word type to pack K/V of ``dtype`` into: as wide as their items, so that packing is a plain copy; None if unpacked."""
    if not packed:
        return None
    return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else jnp.uint32


def pack(tree: object, word: type | None) -> Buffer:
    """All leaves of ``tree`` (arrays with items of 2, 4 or 8 bytes) as one 1-D array of words, bit for bit, or of floats that have
    their values; if ``word`` is None, a tuple of the leaves."""
    if word is None:
        return tuple(jax.tree.leaves(tree))
    return jnp.concatenate([_as_words(leaf, word).reshape(-1) for leaf in jax.tree.leaves(tree)])


def _as_words(leaf: Array, word: type) -> Array:
    if not _is_floating(word):
        return lax.bitcast_convert_type(leaf, word)
    return leaf.astype(word) if _is_floating(leaf.dtype) else lax.bitcast_convert_type(leaf, jnp.uint16).astype(word)


def unpack(buffer: Buffer, like: Tree) -> Tree:
    """The inverse of :func:`pack`; ``like`` is a tree with the shapes and dtypes that were packed."""
    leaves, structure = jax.tree.flatten(like)
    if isinstance(buffer, tuple):
        return jax.tree.unflatten(structure, buffer)
    counts = [math.prod(leaf.shape) * _words_of_item(leaf.dtype, buffer.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, [_restore(*pair) for pair in zip(_cut(buffer, counts), leaves, strict=True)])


def word_of(spec: RingSpec, tree: object) -> type | None:
    """What ``tree``'s arrays are packed into; None if they are sent as they are."""
    if spec.differentiable and spec.problem.backend == "cpu":
        floats = [leaf.dtype for leaf in jax.tree.leaves(tree) if _is_floating(leaf.dtype)]
        return reduce(jnp.promote_types, floats, jnp.dtype("float32")).type
    smallest = min(jax.tree.leaves(tree), key=lambda leaf: leaf.dtype.itemsize)
    return wire_dtype(smallest.dtype, packed=spec.problem.backend == "cpu")


class Transfer(NamedTuple):
    """A buffer made by :func:`pack`, to be sent ``hop`` ranks ahead, or as many along each axis."""

    buffer: Buffer
    hop: int | tuple[int, ...]


def start_transfers(transfers: list[Transfer], axis_name: AxisName, size: int | tuple[int, ...]) -> list[Buffer]:
    """Starts the transfers; :func:`finish_transfers` returns what arrives from the ranks ``hop`` before this one. ``size``: how
    many ranks there are, or along each axis where hops are along axes."""
    ranks = np.arange(np.prod(size)).reshape(size)
    axes, places = numbered(axis_name, ranks.size)

    def send(buffer: Buffer, hop: int | tuple[int, ...]) -> Buffer:
        targets = np.roll(ranks, -np.array(hop), tuple(range(ranks.ndim))).reshape(-1).tolist()
        pairs = [(places[rank], places[target]) for rank, target in enumerate(targets)]
        return collective(partial(lax.ppermute, axis_name=axes, perm=pairs), buffer)

    if any(isinstance(transfer.buffer, tuple) for transfer in transfers):
        return [send(*transfer) for transfer in transfers]
    arriving: list[Buffer] = []
    for hop in _hops(transfers):  # transfers with the same hop share a buffer
        buffer: Buffer = jnp.concatenate(_with_hop(transfers, hop))
        arriving.append(send(ordered_after(buffer, arriving[-1]) if arriving else buffer, hop))
    return arriving


def collective(send: Callable[[Sent], Sent], buffer: Sent) -> Sent:
    """``send(buffer)``. Its derivative in forward mode goes with it: apart, they would be in no order (:func:`ordered_after`)."""
    return _collective(send, buffer) if isinstance(buffer, Array) and _is_floating(buffer.dtype) else send(buffer)  # type: ignore[return-value]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _collective(send: Callable[[Array], Array], buffer: Array) -> Array:
    return send(buffer)


@_collective.defjvp
def _(send: Callable[[Array], Array], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    both = send(jnp.stack([*primals, *tangents], axis=-1))
    return both[..., 0], both[..., 1]


def numbered(axis_name: AxisName, size: int) -> tuple[AxisName, list[int]]:
    """The axes, and the index of every rank along them: ``lax.ppermute`` numbers devices in the mesh's order of axes, but
    ``lax.axis_index``, which defines the ranks, in the order of ``axis_name``."""
    order = jax.sharding.get_abstract_mesh().axis_names
    if not isinstance(axis_name, tuple) or not set(axis_name) <= set(order):
        return axis_name, list(range(size))
    axes = tuple(sorted(axis_name, key=order.index))
    ranks = np.arange(size).reshape([lax.axis_size(name) for name in axis_name])
    return axes, np.argsort(ranks.transpose([axis_name.index(name) for name in axes]).reshape(-1)).tolist()


def finish_transfers(arriving: list[Buffer], transfers: list[Transfer]) -> list[Buffer]:
    """What arrived: one buffer for each of ``transfers``."""
    if any(isinstance(transfer.buffer, tuple) for transfer in transfers):
        return arriving
    groups = {
        hop: iter(_cut(words, [sent.size for sent in _with_hop(transfers, hop)]))
        for hop, words in zip(_hops(transfers), arriving, strict=True)
        if not isinstance(words, tuple)
    }
    return [next(groups[transfer.hop]) for transfer in transfers]


def ordered_after(buffer: Buffer, done: Buffer) -> Buffer:
    """``buffer``, which is not sent before ``done`` is computed: two rotations of one program must be ordered.

    Otherwise XLA on CPU may run them in a different order on each device and deadlock. It also drops optimization barriers, so one
    word is made to depend on ``done``: the added term is a test for NaNs that no arithmetic produces. It is 0, but XLA cannot know.
    """
    buffer, done = lax.optimization_barrier((buffer, done))
    if isinstance(buffer, tuple) or isinstance(done, tuple):
        return buffer
    bits = lax.bitcast_convert_type(done.reshape(-1)[:8], f"uint{8 * done.dtype.itemsize}")
    never = jnp.all(bits == jnp.array(_ODD_NAN[done.dtype.itemsize], bits.dtype))
    return buffer.at[0].add(never.astype(buffer.dtype))


def tree_after(spec: RingSpec, tree: Tree, done: Array) -> Tree:
    """:func:`ordered_after` for what is to be packed later: ``tree``, of which nothing is sent before ``done`` is computed."""
    return unpack(ordered_after(pack(tree, word_of(spec, tree)), done), tree)


# By item size in bytes: a bit pattern that is a NaN in every floating type, even if the items are packed words.
_ODD_NAN = {2: 0x7FC1, 4: 0x7FC1_7FC1, 8: 0x7FC1_7FC1_7FC1_7FC1}


def _hops(transfers: list[Transfer]) -> list:
    return sorted({transfer.hop for transfer in transfers})


def _with_hop(transfers: list[Transfer], hop: int | tuple[int, ...]) -> list[Array]:
    return [transfer.buffer for transfer in transfers if transfer.hop == hop and not isinstance(transfer.buffer, tuple)]


def _cut(words: Array, counts: list[int]) -> list[Array]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [words[start : start + count] for start, count in zip(starts, counts, strict=True)]


def _is_floating(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _words_of_item(dtype: np.dtype, word: np.dtype) -> int:
    if not _is_floating(word):
        return dtype.itemsize // word.itemsize
    return 1 if _is_floating(dtype) else dtype.itemsize // 2


def _restore(words: Array, leaf: Array | jax.ShapeDtypeStruct) -> Array:
    if _is_floating(words.dtype):
        if _is_floating(leaf.dtype):
            return words.reshape(leaf.shape).astype(leaf.dtype)
        words = words.astype(jnp.uint16)
    # Bitcasts, not bit shifts: XLA on GPU loses the low halves of shifted words that are sent (benchmarks/NOTES.md).
    per_item = leaf.dtype.itemsize // words.dtype.itemsize
    shape = leaf.shape if per_item == 1 else (*leaf.shape, per_item)
    return lax.bitcast_convert_type(words.reshape(shape), leaf.dtype)
