"""A mask builder's mask objects as a static mask, a function, or a table of tiles: the first of these that is possible.

Splash attention's masks (JAX's, and copies of them elsewhere) are recognised by type, so they need no array at any length. Any
other object is sliced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple, SupportsIndex, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_core.masks.functions import Predicate
from jax_core.masks.static import Mask, both, make_mask, visible
from jax_core.options import SlicedMask

_TILE = 128  # of the table


class Built(NamedTuple):
    """The masks of all heads together: a static mask, to be combined with the call's own; a predicate or None; and its arrays."""

    mask: Mask
    predicate: Predicate | None = None
    arrays: tuple = ()


def build_mask(mask_builder: Callable, q_length: int, k_length: int, heads: int, num_reps: int, static: bool = True) -> Built:
    """``mask_builder(q_len, kv_len, num_heads, head_idx, num_reps)``, called once per head, returns one of splash attention's masks
    or any object, such as a NumPy array, that ``[q_slice, k_slice]`` turns into booleans over the indices of the whole sequence.

    ``static``: whether positions equal those indices, so that a static mask can express the same.
    """
    with jax.ensure_compile_time_eval():  # a builder may use jax.numpy, even if the caller is traced
        masks = [mask_builder(q_length, k_length, heads, head, num_reps) for head in range(heads)]
        for mask in masks:
            shape = getattr(mask, "shape", (q_length, k_length))
            if tuple(shape) != (q_length, k_length):
                raise ValueError(f"mask_builder must return masks of {q_length} x {k_length}, got {shape}")
        rules = [_rule(mask) for mask in masks]
        if any(rule is None for rule in rules):
            return _table(masks, q_length, k_length)
    if static and isinstance(rules[0], Mask) and all(rule == rules[0] for rule in rules):
        return Built(rules[0])
    functions = [partial(visible, rule) if isinstance(rule, Mask) else rule for rule in rules]
    groups = [[head for head, rule in enumerate(rules) if rule == other] for other in dict.fromkeys(rules)]
    token = ("mask_builder", *rules)
    return Built(Mask(), Predicate(token, "index", partial(_apply, functions, groups), partial(_on_tile, functions, groups)))


# What a mask object becomes: a static mask, or else a function of the indices of queries and keys in `[q, k]` arrays.
Rule = Union[Mask, "_Shifted", "_Joined"]


def _rule(mask: Any) -> Rule | None:
    """A mask object as a static mask, or as a function of query and key indices in ``[q, k]`` arrays; None if it is neither."""
    if not type(mask).__module__.endswith("splash_attention_mask"):
        return None
    kind, offset = type(mask).__name__, getattr(mask, "offset", 0)
    if kind in ("LogicalAnd", "LogicalOr"):
        return _joined(kind, _rule(mask.left), _rule(mask.right))
    make = {
        "FullMask": lambda: Mask(),
        "CausalMask": lambda: make_mask(True),
        "ChunkedCausalMask": lambda: make_mask(chunk=index(mask.chunk_size)),
        "LocalMask": lambda: make_mask(window=_sides(*mask.window_size)),
    }.get(kind)
    natural = np.array_equal(getattr(mask, "q_sequence", np.arange(mask.shape[0])), np.arange(mask.shape[0]))
    if make is None or not natural or any(side is not None and side < 0 for side in getattr(mask, "window_size", ())):
        return None  # left of -1 means right of 1: no window has such a side
    return _Shifted(make(), offset) if offset else make()


def _sides(left: SupportsIndex | None, right: SupportsIndex | None) -> tuple[int | None, int | None]:
    """As Python ints; the sides may be NumPy integers."""
    return left if left is None else index(left), right if right is None else index(right)


class _Shifted(NamedTuple):
    """A static mask with the queries' positions shifted by ``offset``."""

    mask: Mask
    offset: int

    def __call__(self, q: Array, k: Array) -> Array:
        return visible(self.mask, q + self.offset, k)


class _Joined(NamedTuple):
    kind: str
    left: Rule
    right: Rule

    def __call__(self, q: Array, k: Array) -> Array:
        a, b = (visible(rule, q, k) if isinstance(rule, Mask) else rule(q, k) for rule in (self.left, self.right))
        return a & b if self.kind == "LogicalAnd" else a | b


def _joined(kind: str, left: Rule | None, right: Rule | None) -> Rule | None:
    if left is None or right is None:
        return None
    if kind == "LogicalAnd" and isinstance(left, Mask) and isinstance(right, Mask):
        return both(left, right) or _Joined(kind, left, right)
    return _Joined(kind, left, right)


def _on_tile(functions: Sequence[Any], groups: list[list[int]], batch: Array, head: Array, q: Array, k: Array) -> Array:
    """``q`` and ``k`` are arrays of the same shape."""
    del batch
    if len(groups) == 1:
        return functions[0](q, k)
    seen = jnp.zeros(q.shape, bool)
    for group in groups:
        here = sum((head == other for other in group[1:]), head == group[0])
        seen = seen | (functions[group[0]](q, k) & (here != 0))
    return seen


def _apply(
    functions: Sequence[Any], groups: list[list[int]], arrays: Sequence[Array], batch: Array, head: Array, q: Array, k: Array
) -> Array:
    del arrays
    return _on_tile(functions, groups, batch, head, q, k)


def _table(masks: list, q_length: int, k_length: int) -> Built:
    """The masks as a table of tiles that stores equal tiles once: ``O(q_length * k_length / 128**2)`` tile numbers and the distinct
    tiles, instead of every boolean."""
    tiles: dict[bytes, int] = {}
    table = np.array([_tile_numbers(mask, q_length, k_length, tiles) for mask in masks], np.int32)
    if (table == table[:1]).all():
        table = table[:1]
    blocks = np.stack([np.frombuffer(tile, np.bool_).reshape(_TILE, _TILE) for tile in tiles])
    return Built(Mask(), Predicate(("mask_builder", table.shape, blocks.shape), "index", _look_up), (table, blocks))


def _tile_numbers(mask: SlicedMask, q_length: int, k_length: int, tiles: dict[bytes, int]) -> list[list[int]]:
    number = partial(_tile_number, mask, q_length, k_length, tiles)
    return [[number(row, column) for column in range(0, k_length, _TILE)] for row in range(0, q_length, _TILE)]


def _tile_number(mask: SlicedMask, q_length: int, k_length: int, tiles: dict[bytes, int], row: int, column: int) -> int:
    rows, columns = min(_TILE, q_length - row), min(_TILE, k_length - column)
    part = np.asarray(mask[row : row + rows, column : column + columns])
    if part.shape != (rows, columns) or part.dtype != np.bool_:
        raise ValueError(
            f"mask_builder must return something that [q_slice, k_slice] turns into booleans: rows {row}:{row + rows} and "
            f"columns {column}:{column + columns} of a mask of {q_length} x {k_length} gave {part.dtype} of shape {part.shape}"
        )
    tile = np.zeros((_TILE, _TILE), np.bool_)
    tile[:rows, :columns] = part
    return tiles.setdefault(tile.tobytes(), len(tiles))


def _look_up(arrays: Sequence[Array | np.ndarray], batch: Array, head: Array | int, q: Array, k: Array) -> Array:
    table, blocks = map(jnp.asarray, arrays)
    head = head if table.shape[0] > 1 else 0  # one table serves all heads when their masks are equal
    return blocks[table[head, q // _TILE, k // _TILE], q % _TILE, k % _TILE]
