"""What the fused ring handles, and which parameters it takes."""

import jax

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.kernels.tpu import launch
from jax_core.kernels.tpu.limits import fitting, params_reason, problem_reason
from jax_core.strategies.contract import same_problem
from jax_core.strategies.fused_ring.constants import route

OWN_PLATFORM: str | None = "pallas"
kernel_problem = same_problem
HANDLES = frozenset(
    "causal left right chunk softcap precision q_segment_ids kv_segment_ids softmax_aux lse_gradient bfloat16 float32 "
    "contiguous zigzag striped".split()
)
IN_PLACE_OF_A_KERNEL = HANDLES


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """Tiles of 512 x 512 and, in the backward, 256 x 512; smaller where half a shard is shorter."""
    q, k = -(-problem.q_length // 2), -(-problem.k_length // 2)
    return FwdParams(fitting(512, q), fitting(512, k)), BwdParams(fitting(256, q), fitting(512, k))


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    """Why the fused kernel cannot compute this, in words, or None."""
    reason = _ring_reason(problem) or problem_reason(problem) or launch.missing(problem.backend)
    return reason or params_reason("fwd_params", forward) or params_reason("bwd_params", backward)


def _ring_reason(problem: Problem) -> str | None:
    if problem.size == 1:
        return "a ring of one rank sends nothing"
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        return "it counts in 32 bits, also segment ids, and JAX's 64-bit mode is on; leave jax_enable_x64 off"
    _, hops = route(problem.scores.mask, problem.layout, problem.size, problem.q_length, problem.k_length)
    return None if hops else "no rank sees another's keys under this mask, so there is nothing to send"
