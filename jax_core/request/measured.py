"""The order in which "auto" tries kernels and strategies, from measurements. It takes the first that can compute a request."""

from typing import NamedTuple

from jax_core.kernels.contract import Problem


class Row(NamedTuple):
    """``order`` applies from ``q_length`` query positions per GPU."""

    q_length: int
    order: tuple[str, ...]
    reason: str


# H200, bfloat16, 32:8 heads of dim 128, zigzag, causal, from torch; TFLOP/s per GPU, forward / forward and backward
# (benchmarks/results/2026-11-22-ring-4xH200, 2026-11-22-one-gpu-*, 2026-11-22-ring-alone-of-8).
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
        512,
        ("cute", "triton", "cuda", "xla"),
        "flash-attn-4's are the fastest, or as fast where the host's work is longer than the device's: one rank of eight at 2k, "
        "nothing sent, 647 / 476 against Triton's 427 / 364 and cuDNN's 309 / 282; one GPU with 512 to 4k 0.29 to 0.39 ms and 1.5 "
        "to 1.7 against Triton's 0.32 to 0.42 and 1.6 to 1.8. Of windows, documents and soft caps, measured at 2k, slower for the "
        "last two, forward: 0.58 and 0.40 ms against 0.49 and 0.38",
    ),
    Row(
        0,
        ("triton", "cute", "cuda", "xla"),
        "decoding: nothing so short was compared, and docs/generation.md's figures are Triton's",
    ),
)


def preferred_kernels(problem: Problem) -> tuple[str, ...]:
    if problem.backend != "gpu":
        return ("pallas", "xla") if problem.backend == "tpu" else ("xla",)  # not measured: no TPU was available
    return next(row.order for row in ON_GPU if problem.q_length >= row.q_length)


# As above, on four GPUs with the kernels above (benchmarks/results/2026-11-22-strategies-*; docs/strategies.md).
STRATEGIES_ON_GPU = (
    Row(
        4096,
        ("ring",),
        "at 4k ring 518 / 474, all-gather 523 / 456, ulysses 467 / 482; at 8k 667 / 599, 631 / 563, 597 / 589; on two GPUs at 4k "
        "241 / 432, 248 / 410, 221 / 377",
    ),
    Row(
        0,
        ("all_gather", "ring"),
        "one exchange and one launch: with Triton, at 2k all-gather 157 / 179, ring 151 / 155, ulysses 142 / 155; on two GPUs 109 "
        "/ 108, 115 / 109, 97 / 95",
    ),
)
GATHERED_AT_MOST = 32768  # positions of the whole sequence; its memory grows with the ring


def preferred_strategies(problem: Problem, platform: str, torus: bool, near: tuple[str, ...]) -> tuple[str, ...]:
    """The order in which "auto" tries strategies. ``torus``: the ranks form a ring in the TPU topology. ``near``: the
    strategies that send no more than a window's edges (at 64k tokens with a window of 4096 on four GPUs all-gather is 1.16 to 1.39
    times as fast as the ring)."""
    if problem.backend == "gpu" and problem.size > 1:
        if near:
            return *near, "ring"
        if problem.size * problem.k_length <= GATHERED_AT_MOST:
            return next(row.order for row in STRATEGIES_ON_GPU if problem.q_length >= row.q_length)
    # By topology, not by a measurement: the fused ring has not run on a TPU.
    return ("fused", "ring") if torus and platform == "auto" else ("ring",)
