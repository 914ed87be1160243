"""The order in which "auto" tries kernels, as data from measurements. It takes the first that can compute the request."""

from typing import NamedTuple

from jax_core.kernels.contract import Problem


class Row(NamedTuple):
    """``order`` applies from ``q_length`` query positions per GPU."""

    q_length: int
    order: tuple[str, ...]
    reason: str


# H200, bfloat16, 32:8 heads of dim 128, zigzag, causal, from torch; TFLOP/s per GPU, forward / forward and backward
# (benchmarks/results/2026-11-21-ring-2xH200). What cuDNN cannot do (masks, segments, float32, ...) goes to Triton at any length.
ON_GPU = (
    Row(
        4096,
        ("cute", "cuda", "triton", "xla"),
        "cuDNN's kernels are faster by more than its joining of partial results costs: at 8k 508 / 452 against Triton's 456 / 368, "
        "at 32k 568 / 531 against 476 / 396",
    ),
    Row(
        0,
        ("triton", "cute", "cuda", "xla"),
        "one launch a step and no joining: at 2k 91 / 110 against cuDNN's 69 / 100. Not measured between 2k and 8k",
    ),
)


def preferred_kernels(problem: Problem) -> tuple[str, ...]:
    if problem.backend != "gpu":
        return ("pallas", "xla") if problem.backend == "tpu" else ("xla",)  # not measured: no TPU was available
    return next(row.order for row in ON_GPU if problem.q_length >= row.q_length)


def preferred_strategies(platform: str, torus: bool) -> tuple[str, ...]:
    """By topology, not by a measurement: the fused ring has not run on a TPU."""
    return ("fused", "ring") if torus and platform == "auto" else ("ring",)
