"""What the fused ring handles, and the parameters that it takes."""

import jax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.strategies.fused_ring.plan import journey

OWN_PLATFORM: str | None = "pallas"
HANDLES = frozenset(
    "causal left right chunk softcap precision q_segment_ids kv_segment_ids softmax_aux lse_gradient bfloat16 float32 "
    "contiguous zigzag striped".split()
)
IN_PLACE_OF_A_KERNEL = HANDLES

_WIDEST = 256
_LANES = 128
_PRECISIONS = ("default", "fastest", "bfloat16", "highest", "float32")


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """Tiles of 512 x 512 and, in the backward, 256 x 512; less where half a shard is less."""
    q, k = (_up(-(-length // 2), _LANES) for length in (problem.q_length, problem.k_length))
    return FwdParams(min(q, 512), min(k, 512)), BwdParams(min(q, 256), min(k, 512))


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    """Why the fused kernel cannot compute this, in words, or None."""
    reasons = _machine_reason(problem), _request_reason(problem), _params_reason(forward, backward)
    return next((reason for reason in reasons if reason is not None), None)


def _machine_reason(problem: Problem) -> str | None:
    if problem.size == 1:
        return "a ring of one rank sends nothing"
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        return "it counts in 32 bits, also segment ids, and JAX's 64-bit mode is on; leave jax_enable_x64 off"
    if problem.backend not in ("tpu", "cpu"):
        return f'it sends from TPU to TPU (a CPU interprets it, slowly), and these arrays are on "{problem.backend}"'
    if problem.backend == "cpu" and jax.process_count() > 1:
        return "the interpreter that stands for a TPU on CPUs knows the devices of one process only"
    return None


def _request_reason(problem: Problem) -> str | None:
    scores = problem.scores
    if max(problem.dim, problem.value_dim) > _WIDEST:
        return f"head dims are at most {_WIDEST}, got {problem.dim} and {problem.value_dim}"
    if scores.precision_name not in (None, *_PRECISIONS):
        return f"it multiplies in one of the precisions {', '.join(_PRECISIONS)}, got {scores.precision}"
    _, hops = journey(scores.mask, problem.layout, problem.size, problem.q_length, problem.k_length)
    return None if hops else "no rank sees another's keys under this mask, so there is nothing to send"


def _params_reason(forward: FwdParams, backward: BwdParams) -> str | None:
    for params in (forward, backward):
        if params.num_stages is not None or params.num_warps is not None:
            return "it has no stages or warps; leave num_stages and num_warps None"
        sizes = params.q_blocksize, params.kv_blocksize
        if any(size is None or size % _LANES for size in sizes):
            return f"block sizes must be multiples of {_LANES}, got {sizes[0]} x {sizes[1]}"
    return None
