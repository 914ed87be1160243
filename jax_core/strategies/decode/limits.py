"""What decoding handles: whatever its kernel handles and does not need to know where in the sequence a rank's keys lie."""

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem

IN_PLACE_OF_A_KERNEL = frozenset("softmax_aux contiguous".split())
HANDLES = IN_PLACE_OF_A_KERNEL | frozenset(
    "causal left right chunk any_position softcap predicates precision logits_dtype "
    "q_segment_ids kv_segment_ids q_position_ids kv_position_ids wide_ids alibi_slopes origin "
    "lse_gradient fused_backward deterministic float16 bfloat16 float32 float64".split()
)
_BY_POSITION = frozenset("causal left right chunk alibi_slopes predicates".split())


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    del forward, backward
    if any(predicate.over == "index" for predicate in problem.scores.predicates):
        return "a mask_builder goes by the index of a key in the sequence, which a cache does not know; give a mask_mod"
    if problem.features & _BY_POSITION and "q_position_ids" not in problem.features:
        return (
            "the queries are the same on all ranks and the keys in any order, so causal masks, windows, chunks, ALiBi and mask_mod "
            "need q_position_ids and kv_position_ids"
        )
    return None
