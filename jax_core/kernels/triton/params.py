"""Tiles and launch settings of the Triton kernels, by what they are for. Measured where benchmarks/NOTES.md says so."""

from jax_core.block import Problem
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.triton.plan import padded_dim

# The widest padded head dim, forward and backward; (q_blocksize, kv_blocksize, num_stages, num_warps) each.
Row = tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]]
_HALF_HOPPER: tuple[Row, ...] = (
    (64, (128, 128, 3, 8), (64, 128, 2, 8)),
    (128, (128, 128, 2, 8), (64, 128, 2, 8)),
    (256, (128, 64, 2, 8), (32, 64, 2, 8)),
)
_HALF_AMPERE: tuple[Row, ...] = (
    (64, (128, 64, 3, 4), (64, 64, 2, 4)),
    (128, (128, 64, 2, 8), (32, 64, 2, 4)),
    (256, (64, 32, 2, 8), (16, 32, 2, 4)),
)
_SINGLE: tuple[Row, ...] = (
    (64, (64, 32, 2, 4), (32, 32, 1, 4)),
    (128, (32, 32, 2, 4), (16, 32, 1, 4)),
    (256, (16, 32, 1, 4), (16, 16, 1, 4)),
)


def default_params(problem: Problem, capability: int) -> tuple[FwdParams, BwdParams]:
    rows = _SINGLE if problem.dtype.itemsize == 4 else _HALF_HOPPER if capability >= 90 else _HALF_AMPERE
    widest = max(padded_dim(problem.dim), padded_dim(problem.value_dim))
    forward, backward = next((forward, backward) for dim, forward, backward in rows if widest <= dim)
    return FwdParams(*forward), BwdParams(*backward)
