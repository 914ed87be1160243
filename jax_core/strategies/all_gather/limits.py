"""What all-gather asks of its kernel."""

from dataclasses import replace

from jax_core.kernels.contract import Problem
from jax_core.masks.static import Mask
from jax_core.strategies.all_gather.reach import bounded, reach

_WHOLE = frozenset("bias mask q_position_ids predicates".split())  # with these, keys are taken from the whole sequence


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
