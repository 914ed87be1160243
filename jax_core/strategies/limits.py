"""What a strategy around a kernel handles: whatever its kernel handles. Sinks and the named layouts it handles itself."""

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.strategies.contract import same_problem

OWN_PLATFORM: str | None = None
kernel_problem = same_problem
IN_PLACE_OF_A_KERNEL = frozenset("softmax_aux contiguous zigzag striped".split())
HANDLES = IN_PLACE_OF_A_KERNEL | frozenset(
    "causal left right chunk any_position softcap dropout_prob predicates precision logits_dtype "
    "bias mask q_segment_ids kv_segment_ids q_position_ids kv_position_ids wide_ids alibi_slopes dropout_seed origin plan "
    "lse_gradient fused_backward deterministic float16 bfloat16 float32 float64".split()
)


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    """Nothing is."""
    del problem, forward, backward
    return None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """None of its own: the kernel's apply."""
    del problem
    return FwdParams(), BwdParams()
