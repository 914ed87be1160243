"""Prefix: the state that enters each piece, from the affine maps of all pieces.

A stretch of the sequence, whatever its length, takes a state ``S [..., key_dim, value_dim]`` to ``M S + E``, and such maps compose.
``M`` is for each head a number (``m [...]``), a diagonal (``m [..., key_dim]``) or a matrix (``m [..., key_dim, key_dim]``).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.pieces import Pieces
from jax_core.varying import vary, varying_axes


class Affine(NamedTuple):
    """``S -> M S + E``, of many stretches: ``e [..., key_dim, value_dim]``, and ``m`` of as many dimensions or one or two fewer."""

    m: Array
    e: Array

    @property
    def is_matrix(self) -> bool:
        return self.m.ndim == self.e.ndim

    def times(self, x: Array) -> Array:
        """``M X``, of states or of other maps' ``M``."""
        return product(self.m, x) if self.is_matrix else self.m.reshape(self.m.shape + (1,) * (x.ndim - self.m.ndim)) * x

    def after(self, first: "Affine") -> "Affine":
        return Affine(self.times(first.m), self.times(first.e) + self.e)

    def adjoint(self, direct: Array) -> "Affine":
        """``dS_out -> M^T dS_out + direct``: how a cotangent goes back through the map."""
        return Affine(transposed(self.m) if self.is_matrix else self.m, direct)

    def gradient_of_m(self, d_out: Array, state: Array) -> Array:
        """For the cotangent ``d_out`` of ``M S + E``."""
        return product(d_out, transposed(state)) if self.is_matrix else (d_out * state).sum(tuple(range(self.m.ndim, state.ndim)))


def product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def states(maps: Affine, state: Array, reverse: bool = False) -> tuple[Array, Array]:
    """``(entering, last)``: the state that enters each of the ``maps``, which follow each other along the first dimension, and the
    one that leaves the last. ``reverse``: the first is the last."""

    def step(state: Array, each: Affine) -> tuple[Array, Array]:
        return each.times(state) + each.e, state

    last, entering = lax.scan(step, vary(state, varying_axes(maps)), maps, reverse=reverse)
    return entering, last


def composed(maps: Affine, reverse: bool = False) -> Affine:
    """All of the maps along the first dimension as one."""

    def step(before: Affine, each: Affine) -> tuple[Affine, None]:
        return each.after(before), None

    first, others = (-1, slice(-1)) if reverse else (0, slice(1, None))
    start, rest = (Affine(maps.m[part], maps.e[part]) for part in (first, others))
    return lax.scan(step, start, rest, reverse=reverse)[0]


def prefix(maps: Affine, state: Array, pieces: Pieces, reverse: bool = False) -> tuple[Array, Array]:
    """``(entering, last)``: the state that enters each of this rank's pieces, and the one that leaves the sequence, which is the
    same on all ranks: each folds the maps of all pieces, in the order of the sequence. ``maps``: of this rank's pieces, in the
    dtype of the fold; ``state`` enters the sequence. ``reverse``: it enters at the end and goes back.

    Each rank sends its pieces' ``M`` and ``E``, once, to all others; after ``state`` is known."""
    count = maps.e.ndim - 2  # of the dimensions before those of a head's state
    flat = [x.reshape(*x.shape[:count], -1) for x in maps]
    packed = pieces.gather(jnp.concatenate(flat, axis=-1), after=state)
    m, e = jnp.split(packed, [flat[0].shape[-1]], axis=-1)
    every = Affine(m.reshape(m.shape[:1] + maps.m.shape[1:]), e.reshape(e.shape[:1] + maps.e.shape[1:]))
    entering, last = states(every, state, reverse)
    return entering[pieces.numbers], last
