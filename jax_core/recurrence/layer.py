"""The contract of a layer with a state: what it is of, and its forward and backward on local shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import accumulation_dtype
from jax_core.masks.layout import Layout
from jax_core.recurrence.pieces import Pieces

WORDS = {
    "b": "batch",
    "t": "seq",
    "l": "tokens",
    "h": "heads",
    "n": "key heads",
    "k": "key dim",
    "v": "value dim",
    "c": "channels",
    "w": "width",
    "s": "width - 1",
}
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Shaped(Protocol):
    """An array of JAX or torch, or a form of one. Lengths may be symbols."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...


S = TypeVar("S", bound=Shaped)


class Operand(NamedTuple):
    """``dims``: which it may have, a letter each (:data:`WORDS`), equal letters being equal lengths in all operands."""

    name: str
    dims: tuple[str, ...]
    optional: bool = False


class Given(NamedTuple):
    """``operands`` in the order of the layer's signature, None for an absent one; ``state``, or None, is what enters the sequence,
    the same on all ranks; ``ids`` int32 ``[batch | 1, length]`` are those of documents, negative for padding, or None."""

    operands: Sequence[Array | None]
    state: Array | None
    ids: Array | None


class Cotangents(NamedTuple):
    """Of the results; None where the state that leaves the sequence has none."""

    y: Array
    last: Array | None


class Results(NamedTuple):
    """``y``, of the form of an operand; the state that leaves the sequence, the same on all ranks; and what the backward ``keeps``
    of the exchange, with a first dimension of this rank's pieces."""

    y: Array
    last: Array
    kept: Array


@dataclass(frozen=True)
class Layer:
    """A layer without its arrays. Equal ones share programs. Its methods take local shards, inside ``shard_map`` where the ring has
    several devices.

    ``final_state``: whether the state that leaves the sequence has a cotangent.
    """

    final_state: bool = False

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def signature(self) -> tuple[Operand, ...]:
        raise NotImplementedError

    @property
    def like(self) -> str:
        """The operand that ``y`` is like."""
        raise NotImplementedError

    @property
    def sharded(self) -> str:
        """The operand of which ranks compare which shard they hold."""
        return self.like

    @property
    def state_dims(self) -> str:
        raise NotImplementedError

    def state_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Of the state that leaves the sequence, for a ``y`` of this dtype."""
        return accumulation_dtype(dtype)

    def on_ring(self, operands: Sequence[Shaped | None], sizes: dict[str, int], layout: Layout, size: int) -> "Layer":
        """The layer with what it decides for a ring of ``size`` ranks and shards of these sizes, the same on all. Raises
        NotImplementedError for a layout that it cannot take, ValueError for sizes that it cannot take."""
        check_pieces(layout, size)
        return self

    def kept_shape(self, sizes: dict[str, int], layout: Layout, size: int) -> tuple[int, ...]:
        """Of a layer that is decided."""
        raise NotImplementedError

    def forward(self, pieces: Pieces, given: Given) -> Results:
        raise NotImplementedError

    def backward(self, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
        """The cotangents of operands and state; of those that all ranks hold, this rank's part. ``kept``: by the forward."""
        raise NotImplementedError

    def like_of(self, operands: Sequence[S | None]) -> S:
        """The one that ``y`` is like, of operands in the order of the signature."""
        like = operands[[operand.name for operand in self.signature].index(self.like)]
        assert like is not None
        return like

    def sizes(self, operands: Sequence[Shaped | None], state: Shaped | None, ids: Shaped | None) -> dict[str, int]:
        """The length of each dimension, by its letter. Raises ValueError for operands that do not fit together."""
        sizes: dict[str, int] = {}
        for operand, x in zip(self.signature, operands, strict=True):
            if x is not None:
                _bind(operand.name, operand.dims, x, sizes)
            elif not operand.optional:
                raise ValueError(f"{self.name} needs {operand.name}, [{_words(operand.dims[0])}]")
        if "n" in sizes and sizes["h"] % sizes["n"]:
            raise ValueError(f"the heads must be a multiple of the key heads, got {sizes['h']} and {sizes['n']}")
        if sizes.get("w", 2) < 2:
            raise ValueError(f"weight must have a width of 2 or more, got {sizes['w']}; without a window there is nothing to share")
        if "w" in sizes:
            sizes["s"] = sizes["w"] - 1
        if state is not None:
            _bind("initial_state", (self.state_dims,), state, sizes)
        if ids is not None and tuple(ids.shape) not in ((sizes["b"], sizes["t"]), (1, sizes["t"])):
            raise ValueError(f"segment_ids must be [batch, seq], here [{sizes['b']}, {sizes['t']}]; got {list(ids.shape)}")
        return sizes


def part_of_state(pieces: Pieces, dstate: Array, state: Array | None) -> Array:
    """Of the cotangent of the state that enters the sequence, the part of this rank: all of it on the one with the first piece."""
    part = jnp.where(pieces.numbers[0] == 0, dstate, 0)
    return part if state is None else part.astype(state.dtype)


def check_pieces(layout: Layout, size: int) -> None:
    """Raises NotImplementedError for shards that are no pieces of the sequence."""
    if layout == "striped" and size > 1:
        raise NotImplementedError(
            'layout="striped" gives a rank every n-th position, and a layer with a state goes from each position to the next: each '
            'would be a message. Use layout="zigzag", "contiguous", or a plan of balance'
        )


def dims_of(operand: Operand, x: Shaped) -> str:
    """Those of its dims that ``x`` has."""
    return next(dims for dims in operand.dims if len(dims) == len(x.shape))


def _bind(name: str, alternatives: tuple[str, ...], x: Shaped, sizes: dict[str, int]) -> None:
    dims = next((dims for dims in alternatives if len(dims) == len(x.shape)), None)
    words = " or ".join(f"[{_words(dims)}]" for dims in alternatives)
    if str(x.dtype).removeprefix("torch.") not in FLOATS:
        raise ValueError(f"{name} must be of {', '.join(FLOATS)}, got {x.dtype}")
    if dims is None:
        raise ValueError(f"{name} must be {words}, got {list(x.shape)}")
    for letter, length in zip(dims, x.shape, strict=True):
        if sizes.setdefault(letter, length) != length:
            raise ValueError(f"{name} must be {words}, with {WORDS[letter]} {sizes[letter]} as the others; got {list(x.shape)}")


def _words(dims: str) -> str:
    return ", ".join(WORDS[letter] for letter in dims)
