"""Maps along the sequence that another program has made, as a layer: which state enters each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.masks.layout import Layout
from jax_core.recurrence.documents import resets
from jax_core.recurrence.layer import Cotangents, Given, Layer, Operand, Results, part_of_state
from jax_core.recurrence.passes import along, back_along
from jax_core.recurrence.pieces import Pieces, pieces_of_a_rank
from jax_core.recurrence.prefix import Affine, states


@dataclass(frozen=True)
class Maps(Layer):
    """``S_t = M_t S_{t-1} + E_t`` and ``y_t = S_{t-1}``; where a document begins ``M_t`` is taken for 0. Each rank sends one map
    for each of its pieces. ``of``, ``by``, ``settings``: the layer that they are of, the operator that made them, and how, which
    ranks compare, and likewise its ``tokens``, a shard, and its ``A`` and ``D``, of which nothing is computed here."""

    of: str = ""
    by: str = ""
    settings: str = ""

    @property
    def name(self) -> str:
        return self.of

    @property
    def signature(self) -> tuple[Operand, ...]:
        made = Operand("m", ("bthkk", "bth")), Operand("e", ("bthkv",))
        shared = (Operand(name, ("h", "hv"), optional=True) for name in ("A", "D"))
        return *made, Operand("tokens", ("blhv",)), *shared

    @property
    def sharded(self) -> str:
        return "tokens"

    @property
    def like(self) -> str:
        return "e"

    @property
    def state_dims(self) -> str:
        return "bhkv"

    def kept_shape(self, sizes: dict[str, int], layout: Layout, size: int) -> tuple[int, ...]:
        """The states that enter this rank's pieces."""
        return pieces_of_a_rank(layout, size), sizes["b"], sizes["h"], sizes["k"], sizes["v"]

    def forward(self, pieces: Pieces, given: Given) -> Results:
        maps = _along_pieces(pieces, given.ids, given.operands)
        first = jnp.zeros_like(maps.e[0, 0]) if given.state is None else given.state.astype(maps.e.dtype)
        starts, last, entering = along(maps, first, pieces)
        return Results(pieces.join(jnp.moveaxis(starts, 0, 2)), last, entering)

    def backward(self, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
        maps, pull = jax.vjp(partial(_along_pieces, pieces, given.ids), given.operands)
        total = jnp.zeros_like(kept[0])
        if self.final_state and d.last is not None:
            total = pieces.sum(d.last.astype(kept.dtype), after=kept)
        starts, _ = states(maps, kept)
        dmaps, dstate = back_along(maps, starts, jnp.moveaxis(pieces.split(d.y), 2, 0), total, pieces)
        return pull(dmaps)[0], part_of_state(pieces, dstate, given.state)


def _along_pieces(pieces: Pieces, ids: Array | None, operands: Sequence[Array | None]) -> Affine:
    """``[positions of a piece, pieces, batch, heads, ...]``"""
    m, e = (jnp.moveaxis(pieces.split(x), 2, 0) for x in operands[:2] if x is not None)
    if ids is not None:
        m = jnp.where(jnp.moveaxis(resets(ids, pieces), 2, 0).reshape(*m.shape[:3], *(1,) * (m.ndim - 3)), 0, m)
    return Affine(m, e)
