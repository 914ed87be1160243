"""A user's mask function or mask object, as arrays and a traceable function of (batch, head, query, key).

Both forms of the reference design become the same thing, so kernels know one. Arrays that the user's function closes over are
lifted out and become operands: a closure over traced values would not survive ``scan``, ``checkpoint`` and the custom VJP.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_core.varying import vary

_TILE = 128  # of a mask builder's table


@dataclass(frozen=True)
class Predicate:
    """``apply(arrays, batch, head, q, k) -> bool`` on integer scalars. Equal tokens mean equal functions.

    ``over``: whether ``q`` and ``k`` are positions (which position ids replace) or indices into the whole sequence.
    """

    token: Hashable
    over: Literal["position", "index"]
    apply: Callable[..., Any] = field(compare=False)


@dataclass(frozen=True)
class _Traced:
    """A mask function's token: its text alone could hide the last digits of a number."""

    function: Callable[..., Any]
    text: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def from_mask_mod(mask_mod: Callable, axes=frozenset()) -> tuple[Predicate, tuple]:
    """``mask_mod(batch, head, q_pos, k_pos) -> bool``, in the style of FlexAttention, traced once on int32 scalars.

    ``axes``: the mesh axes that the scalars vary over. Returns the predicate and the arrays it closes over.
    """
    scalars = [vary(jnp.int32(0), axes)] * 4
    try:
        closed = jax.make_jaxpr(lambda *where: mask_mod(*where))(*scalars)  # a new function: traces are cached by function
    except Exception as error:
        raise ValueError(
            "mask_mod is traced by JAX: it must be built from operators and jax.numpy on its four integer arguments "
            "(batch, head, q_pos, k_pos), with no `if`, `and`, `or` on them and no torch or NumPy array indexed by them"
        ) from error
    results = closed.out_avals
    if len(results) != 1 or results[0].shape != () or results[0].dtype != jnp.bool_:
        raise ValueError(f"mask_mod must return one boolean scalar, got {[str(result) for result in results]}")

    def apply(arrays, *where):
        consts = [array.reshape(const.aval.shape) for array, const in zip(arrays, closed.jaxpr.constvars, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*where)[0]

    return Predicate(_Traced(mask_mod, str(closed.jaxpr), tuple(map(str, axes))), "position", apply), tuple(closed.consts)


def from_mask_builder(mask_builder: Callable, q_length: int, k_length: int, heads: int, num_reps: int) -> tuple[Predicate, tuple]:
    """``mask_builder(q_len, kv_len, num_heads, head_idx, num_reps)``, called once a head, returns something that
    ``[q_slice, k_slice]`` turns into booleans over global positions (a NumPy array does, splash attention's masks do).

    The masks are stored as a table of tiles in which equal tiles are kept once: ``O(q_length * k_length / 128**2)`` numbers and
    the distinct tiles, instead of every boolean.
    """
    tiles: dict[bytes, int] = {}
    with jax.ensure_compile_time_eval():  # a builder may use jax.numpy, also where the caller is traced
        masks = [mask_builder(q_length, k_length, heads, head, num_reps) for head in range(heads)]
        table = np.array([_tile_numbers(mask, q_length, k_length, tiles) for mask in masks], np.int32)
    if (table == table[:1]).all():
        table = table[:1]
    blocks = np.stack([np.frombuffer(tile, np.bool_).reshape(_TILE, _TILE) for tile in tiles])
    return Predicate(("mask_builder", table.shape, blocks.shape), "index", _look_up), (table, blocks)


def _tile_numbers(mask, q_length: int, k_length: int, tiles: dict[bytes, int]) -> list[list[int]]:
    number = partial(_tile_number, mask, q_length, k_length, tiles)
    return [[number(row, column) for column in range(0, k_length, _TILE)] for row in range(0, q_length, _TILE)]


def _tile_number(mask, q_length, k_length, tiles, row, column) -> int:
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


def _look_up(arrays, batch, head, q, k):
    table, blocks = map(jnp.asarray, arrays)
    head = head if table.shape[0] > 1 else 0  # one table serves all heads when their masks are equal
    return blocks[table[head, q // _TILE, k // _TILE], q % _TILE, k % _TILE]


def depends_on(predicate: Predicate, arrays, axes=frozenset()) -> tuple[bool, bool]:
    """Whether the predicate's answer can depend on the batch entry, and on the head; True where that is not known. ``axes``: the
    mesh axes that its arguments vary over."""
    scalars = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    jaxpr = jax.make_jaxpr(lambda *where: predicate.apply(arrays, *vary(where, axes)))(*scalars).jaxpr
    needed = {variable for variable in jaxpr.outvars if not hasattr(variable, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            needed |= {variable for variable in equation.invars if not hasattr(variable, "val")}
    batch, head = jaxpr.invars[:2]
    return batch in needed, head in needed
