"""What ``platform="auto"`` tries first, on a GPU: the outcome of measurements, as data. It takes the first that can."""

from typing import NamedTuple

from jax_core.block import Problem


class Choice(NamedTuple):
    """``order`` from ``q_length`` query positions a GPU on."""

    q_length: int
    order: tuple[str, ...]
    reason: str


# H200, bfloat16, 32:8 heads of 128, zigzag, causal, from torch; TFLOP/s a GPU, forward / forward and backward
# (benchmarks/results/2026-11-21-ring-2xH200). What cuDNN cannot (masks, segments, float32, ...) goes to Triton at any length.
ON_GPU = (
    Choice(
        4096,
        ("cuda", "triton", "xla"),
        "cuDNN's kernels are faster by more than its joining of partial results costs: at 8k 508 / 452 against Triton's 456 / 368, "
        "at 32k 568 / 531 against 476 / 396",
    ),
    Choice(
        0,
        ("triton", "cuda", "xla"),
        "one launch a step and no joining: at 2k 91 / 110 against cuDNN's 69 / 100. Not measured between 2k and 8k",
    ),
)


def preference(problem: Problem, backend: str) -> tuple[str, ...]:
    if backend != "gpu":
        return ("pallas", "xla") if backend == "tpu" else ("xla",)  # not measured: no TPU was at hand
    return next(choice.order for choice in ON_GPU if problem.q_length >= choice.q_length)
