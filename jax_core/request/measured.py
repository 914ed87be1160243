"""The order in which "auto" tries kernels, as data from measurements. It takes the first that can compute the request."""

from typing import NamedTuple

from jax_core.kernels.contract import Problem


class Row(NamedTuple):
    """``order`` applies from ``q_length`` query positions per GPU."""

    q_length: int
    order: tuple[str, ...]
    reason: str


# H200, bfloat16, 32:8 heads of dim 128, zigzag, causal, from torch; TFLOP/s per GPU, forward / forward and backward
# (benchmarks/results/2026-11-22-ring-4xH200, 2026-11-22-one-gpu-*, 2026-11-21-ring-2xH200).
ON_GPU = (
    Row(
        4096,
        ("cute", "cuda", "triton", "xla"),
        "flash-attn-4's kernels are the fastest with every feature that was measured: on four GPUs at 4k 510 / 469 against "
        "cuDNN's 424 / 379, at 16k 713 / 639 against 613 / 527, at 64k 672 / 614 against 602 / 532; on one GPU their forward is "
        "1.4 times as fast as Triton's with a window, 1.05 to 1.2 times with documents. Without them: cuDNN's at 8k 508 / 452, "
        "Triton's 456 / 368",
    ),
    Row(
        0,
        ("triton", "cute", "cuda", "xla"),
        "one launch a step and no joining: at 2k 91 / 110 against cuDNN's 69 / 100. Not measured between 2k and 4k, nor for "
        "flash-attn-4",
    ),
)


def preferred_kernels(problem: Problem) -> tuple[str, ...]:
    if problem.backend != "gpu":
        return ("pallas", "xla") if problem.backend == "tpu" else ("xla",)  # not measured: no TPU was available
    return next(row.order for row in ON_GPU if problem.q_length >= row.q_length)


def preferred_strategies(platform: str, torus: bool) -> tuple[str, ...]:
    """By topology, not by a measurement: the fused ring has not run on a TPU."""
    return ("fused", "ring") if torus and platform == "auto" else ("ring",)
