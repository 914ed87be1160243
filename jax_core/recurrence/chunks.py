"""Chunks of the sequence as affine maps of the state that enters them: gated linear attention, and the gated delta rule.

For a token ``S_t = a_t S_{t-1} + k_t u_t^T`` and ``y_t = q_t^T S_t``, with ``a_t = exp(g_t)`` a number or a diagonal for each
head. Linear attention has ``u_t = v_t``; the delta rule ``u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)``. With ``G`` the sum of ``g``
from the start of the chunk, or of the document in it, ``S_0`` the state there, and ``i >= j`` in one document:

    S_i = exp(G_i) S_0 + sum_j exp(G_i - G_j) k_j u_j^T
    (I + A) U = beta (V - K exp(G) S_0),   A_ij = beta_i k_i^T exp(G_i - G_j) k_j  for j < i     so  U = U_0 - W S_0
    y = B U + Q exp(G) S_0,                B_ij = q_i^T exp(G_i - G_j) k_j                       so  y = y_0 + P S_0

(Yang et al. 2024, arXiv:2412.06464, equations 8 to 12; Kimi Linear, arXiv:2510.26692.) No exponent is positive where ``g`` is not.
"""

from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.prefix import Affine, product, transposed

ROWS = 16  # of a block in which the exponents of a diagonal decay are taken pair by pair


class Inputs(NamedTuple):
    """Of the pieces of a rank: ``q, k [pieces, batch, length, heads, key_dim]``, ``v [..., heads, value_dim]``, ``beta [..., heads,
    1]`` (None: linear attention), ``g [..., heads, 1 | key_dim]``, and ``skip`` as ``v``, which is added to the output, or None;
    float32 or float64."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array | None
    skip: Array | None


class Chunks(NamedTuple):
    """``y = own + reads S`` and ``S_out = maps(S)`` for the state ``S`` that enters a chunk. ``maps [chunks, pieces, batch,
    heads]``, ``reads [chunks, pieces, batch, heads, chunk, key_dim]``, ``own [..., chunk, value_dim]``."""

    maps: Affine
    reads: Array
    own: Array


def chunked(inputs: Inputs, resets: Array | None, size: int) -> Chunks:
    """The chunks of ``size`` tokens, counted from the start of each piece; the last may have fewer. ``resets [pieces, batch,
    length]``: where a document begins, of which nothing before it may know."""
    # One that leaves nothing of the state would leave nothing of the smaller ones in a sum with it.
    inputs = inputs._replace(g=jnp.maximum(inputs.g, least_decay(float(jnp.finfo(inputs.g.dtype).tiny))))
    q, k, v, g, beta, skip = (None if x is None else cut(x, size) for x in inputs)
    assert q is not None and k is not None and v is not None and g is not None
    starts = jnp.zeros(q.shape[-2:-1], bool) if resets is None else cut(resets[..., None, None], size)[..., 0]
    # Counted in the dtype of the rest: of int32 beside float64 and chunks of 8 LLVM aborts the process (AVX-512).
    document = jnp.cumsum(starts, axis=-1, dtype=q.dtype)
    before = (document[..., :, None] == document[..., None, :]) & jnp.tri(size, dtype=bool)
    first, last = (document == 0)[..., None], (document == document[..., -1:])[..., None]
    # Of each document by itself: what is before it would be rounded away from it, and not to the bit.
    # Each head's by itself too: its bits do not depend on how many others there are.
    total = (
        jnp.cumsum(g, axis=-2) if resets is None else product(jnp.broadcast_to(before, (*g.shape[:-1], size)).astype(g.dtype), g)
    )
    through = decay(total, first)  # of the state that enters, what is left at each token
    to_end = transposed(k * decay(total[..., -1:, :] - total, last))
    reads, decayed, values = q * through, through[..., -1, :], v
    scores = weighed(q, k, total, before)
    if beta is None:
        m = decayed[..., 0] if decayed.shape[-1] == 1 else decayed
    else:
        inner = beta * weighed(k, k, total, before & ~jnp.eye(size, dtype=bool))
        both = beta * jnp.concatenate([v, k * through], axis=-1)
        values, w = jnp.split(solve_unit_lower(inner, both), [v.shape[-1]], axis=-1)
        m = decayed[..., None] * jnp.eye(k.shape[-1], dtype=k.dtype) - product(to_end, w)
        reads = reads - product(scores, w)
    y = product(scores, values)
    return Chunks(Affine(m, product(to_end, values)), reads, y if skip is None else y + skip)


def least_decay(tiny: float) -> float:
    """A logarithm whose exponential is 0, by the least normal number of a dtype: -104.8 in float32."""
    return 1.2 * log(tiny)


def solve_unit_lower(a: Array, b: Array) -> Array:
    """``X`` of ``(I + a) X = b``, by matrix products alone. ``a [..., n, n]``: 0 on and above the diagonal. ``b [..., n, m]``.

    ``lax.linalg.triangular_solve`` would do, but on CPU (jaxlib 0.10.2) it divides a batch among the threads that XLA computes with
    and waits for them on one of them: with two such calls at a time on two cores, none is left, and the process stands still."""
    inverse = _inverse(lax.stop_gradient(a))
    return lax.custom_linear_solve(
        lambda x: x + product(a, x),
        b,
        solve=lambda _, right: product(inverse, right),
        transpose_solve=lambda _, right: product(transposed(inverse), right),
    )


def _inverse(a: Array) -> Array:
    """Of ``I + a``: that of its blocks on the diagonal, 1, 2, 4, ... rows each. Two neighbours ``P`` and ``R`` with ``Q`` below
    ``P`` make a block twice as large, whose inverse has ``-R^-1 Q P^-1`` in the place of ``Q``: as stable as substitution."""
    rows = jnp.arange(a.shape[-1])
    inverse, size = jnp.eye(len(rows), dtype=a.dtype), 1
    while size < len(rows):
        of = rows // size
        below = (of[:, None] == of + 1) & (of % 2 == 0)
        q = jnp.where(below, a, 0)
        inverse = inverse - (q if size == 1 else product(inverse, product(q, inverse)))
        size *= 2
    return jnp.broadcast_to(inverse, a.shape)


def cut(x: Array, size: int) -> Array:
    """``[pieces, batch, length, heads, dim]`` as ``[chunks, pieces, batch, heads, size, dim]``. Where the last chunk has no token
    there is 0, which changes no state."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0), (0, 0)])
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])
    return x.transpose(2, 0, 1, 4, 3, 5)


def uncut(x: Array, length: int) -> Array:
    """The inverse of :func:`cut`."""
    x = x.transpose(1, 2, 0, 4, 3, 5)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]


def decay(exponent: Array, mask: Array) -> Array:
    """``exp(exponent)`` where ``mask``, else 0; no exponent that is masked overflows, nor does its gradient."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0)), 0)


def weighed(q: Array, k: Array, total: Array, mask: Array) -> Array:
    """``[..., i, j]``: the product of ``q_i`` and ``k_j`` with the decay between them, ``exp(total_i - total_j)``, where ``mask``,
    which is below the diagonal."""
    if total.shape[-1] == 1:
        return product(q, transposed(k)) * decay(total - transposed(total), mask)
    rows = [_weighed_rows(q, k, total, mask, start) for start in range(0, q.shape[-2], ROWS)]
    return jnp.concatenate(rows, axis=-2)


def _weighed_rows(q: Array, k: Array, total: Array, mask: Array, start: int) -> Array:
    """The same for a block of rows and a diagonal decay, by its two halves: from a key to the block's first row, and on from there.
    Within the block, where one half would grow, it is taken pair by pair."""
    size, end = q.shape[-2], min(start + ROWS, q.shape[-2])
    here, left = slice(start, end), slice(0, start)
    # With leading dimensions of their own XLA on CPU (jaxlib 0.10.2) compiles the two sums of the backward to a crash.
    lead, own_mask = q.shape[:-2], jnp.broadcast_to(mask[..., here, here], (*q.shape[:-2], end - start, end - start))
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (q[..., here, :], k[..., here, :], total[..., here, :], own_mask))
    block = _pair_by_pair(*flat)
    block = block.reshape(*lead, *block.shape[1:])
    row = jnp.pad(block, [(0, 0)] * (block.ndim - 1) + [(start, size - end)])
    if not start:
        return row
    middle = total[..., start : start + 1, :]
    # Only tokens of its document are decayed to or from the middle, which the mask need not say of itself.
    after, earlier = mask[..., here, start : start + 1].at[..., 0, 0].set(True), transposed(mask[..., start : start + 1, left])
    on = q[..., here, :] * decay(total[..., here, :] - middle, after)
    until = k[..., left, :] * decay(middle - total[..., left, :], earlier)
    return row.at[..., left].set(jnp.where(mask[..., here, left], product(on, transposed(until)), 0))


@jax.custom_vjp
def _pair_by_pair(q: Array, k: Array, total: Array, mask: Array) -> Array:
    return (q[..., :, None, :] * k[..., None, :, :] * _between(total, mask)).sum(-1)


def _between(total: Array, mask: Array) -> Array:
    """``[..., i, j, key_dim]``"""
    return decay(total[..., :, None, :] - total[..., None, :, :], mask[..., None])


def _forward(q: Array, k: Array, total: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    return _pair_by_pair(q, k, total, mask), (q, k, total, mask)


def _backward(residuals: tuple[Array, ...], d: Array) -> tuple[Array, Array, Array, None]:
    """A total is a factor ``exp(total_i)`` of ``q_i`` and ``exp(-total_j)`` of ``k_j``, so its cotangent follows from theirs."""
    q, k, total, mask = residuals
    weights = d[..., None] * _between(total, mask)
    dq = (weights * k[..., None, :, :]).sum(-2)
    dk = (weights * q[..., :, None, :]).sum(-3)
    return dq, dk, q * dq - k * dk, None


_pair_by_pair.defvjp(_forward, _backward)
