"""How many bytes a pass sends and holds, from the request alone: of queries, keys, values, results and their gradients. Ids, masks
and biases are not counted, nor what a kernel makes for itself."""

from typing import NamedTuple

import jax.numpy as jnp

from jax_core.kernels.contract import Problem, accumulation_dtype


class Traffic(NamedTuple):
    """``sent``: by a rank, to any other, at most. ``held``: at once, beside its operands and results."""

    sent: int
    held: int


class Sizes(NamedTuple):
    """Bytes of a rank's shards. ``keys``: with the values; ``sums``: of their gradients, and ``rows``: a number for each row and
    head, in the accumulation dtype."""

    queries: int
    keys: int
    out: int
    sums: int
    rows: int


def sizes(problem: Problem) -> Sizes:
    narrow, wide = jnp.dtype(problem.dtype).itemsize, accumulation_dtype(problem.dtype).itemsize
    rows = problem.batch * problem.q_length * problem.heads
    keys = problem.batch * problem.k_length * problem.kv_heads * (problem.dim + problem.value_dim)
    return Sizes(rows * problem.dim * narrow, keys * narrow, rows * problem.value_dim * narrow, keys * wide, rows * wide)


def rotated(problem: Problem, hops: int, backward: bool) -> Traffic:
    """Of keys that are sent on ``hops`` times. Their gradients follow as sums, and go home in the operands' dtype."""
    nbytes = sizes(problem)
    if not backward or not hops:
        return Traffic(hops * nbytes.keys, min(hops, 2) * nbytes.keys)
    return Traffic(hops * (nbytes.keys + nbytes.sums) + nbytes.keys, min(hops, 2) * nbytes.keys + 2 * nbytes.sums)
