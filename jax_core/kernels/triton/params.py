"""Tiles and launch settings of the Triton kernels, by dtype, GPU and head dim (measurements: benchmarks/NOTES.md)."""

from typing import NamedTuple

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.kernels.triton.constants import padded_dim

Settings = tuple[int, int, int, int]  # q_blocksize, kv_blocksize, num_stages, num_warps


class Row(NamedTuple):
    """Settings for padded head dims up to ``dim``."""

    dim: int
    forward: Settings
    backward: Settings


HOPPER = (
    Row(64, (64, 64, 3, 4), (64, 64, 3, 4)),
    Row(128, (64, 64, 3, 4), (64, 128, 3, 8)),
    Row(256, (64, 32, 3, 4), (32, 64, 2, 8)),
)
# A bias or a packed mask takes another tile through shared memory at every stage.
HOPPER_WITH_TILES = (
    Row(64, (64, 64, 2, 4), (64, 64, 2, 4)),
    Row(128, (64, 64, 2, 4), (32, 64, 2, 4)),
    Row(256, (64, 32, 2, 4), (32, 32, 2, 4)),
)
AMPERE = (
    Row(64, (128, 64, 2, 4), (64, 64, 2, 4)),
    Row(128, (64, 64, 2, 4), (32, 64, 2, 4)),
    Row(256, (64, 32, 2, 4), (32, 32, 1, 4)),
)
FLOAT32 = (
    Row(64, (64, 32, 2, 4), (32, 32, 1, 4)),
    Row(128, (32, 32, 2, 4), (32, 32, 1, 8)),
    Row(256, (32, 32, 1, 8), (32, 32, 1, 8)),
)


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    widest = max(padded_dim(problem.dim), padded_dim(problem.value_dim))
    row = next(row for row in _table(problem) if widest <= row.dim)
    q_blocksize, *others = row.forward
    return FwdParams(min(q_blocksize, _fewest_rows(problem)), *others), BwdParams(*row.backward)


def _fewest_rows(problem: Problem) -> int:
    """The smallest tile that holds all query rows of a K/V head, as where one token is decoded."""
    rows = problem.q_length * (problem.heads // problem.kv_heads)
    return padded_dim(rows)


def _table(problem: Problem) -> tuple[Row, ...]:
    if problem.dtype == "float32":
        return FLOAT32
    if problem.capability not in (90, 100, 103):  # the others have less shared memory
        return AMPERE
    tiles = {"bias", "mask"} & problem.features or problem.scores.predicates
    return HOPPER_WITH_TILES if tiles else HOPPER


class Listed(NamedTuple):
    """What a search tries for padded head dims up to ``dim``."""

    dim: int
    forward: tuple[Settings, ...]
    backward: tuple[Settings, ...]


# Around what won by hand (benchmarks/NOTES.md); small tiles are for windows and for GPUs with less shared memory.
CANDIDATES = (
    Listed(
        64,
        (
            (64, 64, 2, 4), (64, 64, 3, 4), (64, 64, 4, 4), (64, 128, 2, 4), (64, 128, 3, 4), (64, 32, 3, 4), (64, 32, 4, 4),
            (128, 64, 2, 4), (128, 64, 3, 4), (128, 64, 3, 8), (128, 128, 3, 4), (128, 128, 3, 8), (32, 64, 3, 4),
        ),
        (
            (64, 64, 2, 4), (64, 64, 3, 4), (64, 64, 4, 4), (32, 64, 3, 4), (32, 64, 4, 4), (32, 128, 3, 4), (32, 128, 2, 4),
            (64, 128, 2, 8), (64, 128, 3, 8), (64, 128, 2, 4), (128, 64, 2, 4), (32, 32, 3, 4),
        ),
    ),
    Listed(
        128,
        (
            (64, 64, 2, 4), (64, 64, 3, 4), (64, 64, 4, 4), (64, 128, 2, 4), (64, 32, 3, 4), (64, 32, 4, 4), (128, 32, 4, 8),
            (128, 64, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 2, 8), (32, 64, 3, 4), (32, 32, 3, 4),
        ),
        (
            (64, 128, 2, 8), (64, 128, 3, 8), (64, 64, 2, 4), (64, 64, 3, 4), (64, 64, 3, 8), (32, 128, 2, 8), (32, 128, 3, 8),
            (32, 128, 4, 8), (32, 128, 3, 4), (32, 64, 2, 4), (32, 64, 3, 4), (32, 32, 3, 4),
        ),
    ),
    Listed(
        256,
        (
            (64, 32, 2, 4), (64, 32, 3, 4), (64, 32, 4, 4), (64, 64, 2, 4), (64, 64, 2, 8), (64, 64, 3, 8), (128, 32, 2, 8),
            (128, 32, 3, 8), (128, 64, 2, 8), (32, 32, 3, 4), (32, 64, 2, 4),
        ),
        (
            (32, 64, 2, 8), (32, 64, 3, 8), (32, 64, 2, 4), (32, 64, 1, 8), (32, 32, 2, 4), (32, 32, 3, 4), (64, 64, 1, 8),
            (64, 64, 2, 8), (16, 64, 2, 4), (16, 64, 3, 4), (32, 128, 1, 8),
        ),
    ),
)  # fmt: skip
CANDIDATES_FLOAT32 = (
    (64, 32, 2, 4), (64, 64, 2, 4), (32, 32, 1, 4), (32, 32, 2, 4), (32, 32, 1, 8), (32, 64, 1, 8), (64, 32, 1, 8),
)  # fmt: skip


def configs(problem: Problem) -> tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]:
    widest = max(padded_dim(problem.dim), padded_dim(problem.value_dim))
    row = next((row for row in CANDIDATES if widest <= row.dim), CANDIDATES[-1])
    forward, backward = row.forward, row.backward
    if problem.dtype == "float32":
        forward = backward = CANDIDATES_FLOAT32
    return tuple(FwdParams(*tile) for tile in forward), tuple(BwdParams(*tile) for tile in backward)


def shared_memory_of(capability: int) -> int:
    """Bytes of shared memory that a program may use."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) * 1024


def shared_memory(problem: Problem, still: int, coming: int, params: FwdParams) -> int:
    """Bytes of the tiles that a kernel keeps: ``still`` rows once (in the forward queries only, so without the value dim),
    ``coming`` rows per stage."""
    dim, value_dim = padded_dim(problem.dim), padded_dim(problem.value_dim)
    alone = dim if not isinstance(params, BwdParams) else dim + value_dim
    return (still * alone + (params.num_stages or 1) * coming * (dim + value_dim)) * (4 if problem.dtype == "float32" else 2)
