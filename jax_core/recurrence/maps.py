"""Maps along the sequence that another program has made, as a layer: which state enters each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.masks.layout import Layout
from jax_core.recurrence.documents import resets
from jax_core.recurrence.layer import Layer, Operand, Results
from jax_core.recurrence.passes import along, back_along
from jax_core.recurrence.pieces import Pieces, pieces_of_a_rank
from jax_core.recurrence.prefix import Affine, states


@dataclass(frozen=True)
class Maps(Layer):
    """``S_t = M_t S_{t-1} + E_t`` and ``y_t = S_{t-1}``; where a document begins ``M_t`` is taken for 0. Each rank sends one map
    for each of its pieces. ``of``: what made them, which ranks compare, and likewise its ``tokens``, a shard, and its ``A`` and
    ``D``, of which nothing is computed here."""

    of: str = ""

    @property
    def name(self) -> str:
        return "state_maps"

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

    def forward(self, pieces: Pieces, operands: Sequence[Array | None], state: Array | None, ids: Array | None) -> Results:
        maps = _along_pieces(pieces, ids, operands)
        first = jnp.zeros_like(maps.e[0, 0]) if state is None else state.astype(maps.e.dtype)
        starts, last, entering = along(maps, first, pieces)
        return Results(pieces.join(jnp.moveaxis(starts, 0, 2)), last, entering)

    def backward(
        self,
        pieces: Pieces,
        operands: Sequence[Array | None],
        state: Array | None,
        ids: Array | None,
        residuals: Array,
        dy: Array,
        dlast: Array | None,
    ) -> tuple[list[Array | None], Array]:
        maps, pull = jax.vjp(partial(_along_pieces, pieces, ids), operands)
        total = jnp.zeros_like(residuals[0])
        if self.final_state and dlast is not None:
            total = pieces.sum(dlast.astype(residuals.dtype), after=residuals)
        starts, _ = states(maps, residuals)
        dmaps, dstate = back_along(maps, starts, jnp.moveaxis(pieces.split(dy), 2, 0), total, pieces)
        dstate = jnp.where(pieces.numbers[0] == 0, dstate, 0)
        return pull(dmaps)[0], dstate if state is None else dstate.astype(state.dtype)


def _along_pieces(pieces: Pieces, ids: Array | None, operands: Sequence[Array | None]) -> Affine:
    """``[positions of a piece, pieces, batch, heads, ...]``"""
    m, e = (jnp.moveaxis(pieces.split(x), 2, 0) for x in operands[:2] if x is not None)
    if ids is not None:
        m = jnp.where(jnp.moveaxis(resets(ids, pieces), 2, 0).reshape(*m.shape[:3], *(1,) * (m.ndim - 3)), 0, m)
    return Affine(m, e)
