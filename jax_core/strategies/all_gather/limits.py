"""What all-gather handles: whatever its kernel handles. Sinks and layouts it handles itself."""

from dataclasses import replace

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.masks.static import Mask
from jax_core.strategies.all_gather.reach import bounded, reach

OWN_PLATFORM: str | None = None
IN_PLACE_OF_A_KERNEL = frozenset("softmax_aux contiguous zigzag striped".split())
HANDLES = IN_PLACE_OF_A_KERNEL | frozenset(
    "causal left right chunk any_position softcap dropout_prob predicates precision logits_dtype "
    "bias mask q_segment_ids kv_segment_ids q_position_ids kv_position_ids wide_ids alibi_slopes dropout_seed origin "
    "plan lse_gradient fused_backward deterministic float16 bfloat16 float32 float64".split()
)
_WHOLE = frozenset("bias mask q_position_ids predicates".split())  # with these, keys are taken from the whole sequence


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    del problem, forward, backward
    return None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """None of its own: the kernel's apply."""
    del problem
    return FwdParams(), BwdParams()


def kernel_problem(problem: Problem) -> Problem:
    """A shard of queries over all keys, or one run of queries over the keys in its window's reach."""
    lengths = problem.q_length, problem.k_length
    mask, features = bounded(problem.scores.mask, problem.size, lengths), problem.features
    if mask.keys is not None:
        features |= {"keys"}
    elif mask != Mask() and not mask.any_position and problem.q_length == problem.size * problem.k_length:
        features |= {"apart"}  # or a kernel that goes by lengths would take the keys for those at the queries' own positions
    asked = replace(problem, scores=replace(problem.scores, mask=mask), features=features)
    plain = not problem.features & _WHOLE
    near = reach(problem.scores.mask, problem.layout, problem.size, lengths, plain)
    if near is None:
        return replace(asked, k_length=problem.size * problem.k_length)
    return replace(
        asked,
        features=features - {problem.layout} | {"contiguous"},
        layout="contiguous",
        q_length=near.run,
        k_length=near.left + near.run + near.right,
    )
