"""Triangular systems by matrix products alone.

``lax.linalg.triangular_solve`` would do, but on CPU (jaxlib 0.10.2) it divides a batch among the threads that XLA computes with and
waits for them on one of them: with two such calls at a time on two cores, none is left, and the process stands still.
"""

import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.prefix import product, transposed


def solve_unit_lower(a: Array, b: Array) -> Array:
    """``X`` of ``(I + a) X = b``. ``a [..., n, n]``: 0 on and above the diagonal. ``b [..., n, m]``."""
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
