"""Which problems share a configuration: those with one key."""

import math

from jax_core.kernels.contract import Problem

LONG = 4096  # a shard of more positions fills a GPU whatever its tiles are; a shorter one may not
WIDEST_GROUP = 8
# What a kernel's inner loop hardly sees: sinks join after the last step, layouts are runs, the LSE's cotangent is part of delta.
_UNSEEN = frozenset("softmax_aux lse_gradient origin keys apart contiguous zigzag striped plan".split())
_TOGETHER = {
    "q_segment_ids": "segments",
    "kv_segment_ids": "segments",
    "q_position_ids": "positions",
    "kv_position_ids": "positions",
    "any_position": "positions",
    "dropout_prob": "dropout",
    "dropout_seed": "dropout",
    "predicates": "functions",
}
_SIZED = ("left", "right", "chunk")


def key_of(kernel: str, problem: Problem) -> str:
    """In words, so that the file can be read: kernel, dtype, dims, query heads a K/V head, what is asked for, the class of lengths.

    A feature counts unless it is listed as unseen, so a new one gets configurations of its own.
    """
    dims = f"{problem.dim}" if problem.dim == problem.value_dim else f"{problem.dim}:{problem.value_dim}"
    asked = " ".join(_asked(problem)) or "full"
    return f"{kernel} {problem.dtype} dim {dims} group {_group(problem)} {asked} {_length(problem)}"


def _asked(problem: Problem) -> list[str]:
    seen = problem.features - _UNSEEN - {problem.dtype} - set(_SIZED)
    sizes = {name: getattr(problem.scores.mask, name) for name in _SIZED}
    sized = {f"{name} {_power_of_two(size + 1)}" for name, size in sizes.items() if size is not None}
    return sorted({_TOGETHER.get(name, name) for name in seen} | sized)


def _group(problem: Problem) -> int:
    return min(WIDEST_GROUP, 2 ** math.ceil(math.log2(problem.heads // problem.kv_heads)))


def _length(problem: Problem) -> str:
    return f"{'over' if max(problem.q_length, problem.k_length) > LONG else 'up to'} {LONG}"


def _power_of_two(size: int) -> int:
    """The nearest one: a window of 128 counts its own position in some APIs, and not in others."""
    return 2 ** round(math.log2(max(1, size)))
