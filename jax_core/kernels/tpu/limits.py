"""The limits that all TPU kernels share, whether they compute a pair of shards or a whole ring."""

from jax_core.config import FwdParams
from jax_core.kernels.contract import Problem

LANES = 128  # block sizes are multiples of it
WIDEST = 256
PRECISIONS = ("default", "fastest", "bfloat16", "highest", "float32")


def problem_reason(problem: Problem) -> str | None:
    """Why no TPU kernel computes this, in words, or None."""
    if max(problem.dim, problem.value_dim) > WIDEST:
        return f"head dims are at most {WIDEST}, got {problem.dim} and {problem.value_dim}"
    if problem.scores.precision_name not in (None, *PRECISIONS):
        return f"it multiplies in one of the precisions {', '.join(PRECISIONS)}, got {problem.scores.precision}"
    return None


def params_reason(name: str, params: FwdParams) -> str | None:
    """Why no TPU kernel takes ``params`` (called ``name`` in the config), or None."""
    if params.num_stages is not None or params.num_warps is not None:
        return f"{name}: kernels for TPUs have no stages or warps; leave num_stages and num_warps None"
    sizes = block_sizes(params)
    if any(size % LANES for size in sizes):
        return f"{name}: block sizes must be multiples of {LANES}, got {sizes[0]} x {sizes[1]}"
    return None


def block_sizes(params: FwdParams) -> tuple[int, int]:
    """The block sizes of queries and keys, from complete parameters."""
    assert params.q_blocksize is not None and params.kv_blocksize is not None
    return params.q_blocksize, params.kv_blocksize


def fitting(size: int, length: int) -> int:
    """The block size, no longer than ``length`` positions need."""
    return min(size, -(-length // LANES) * LANES)
