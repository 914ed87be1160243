"""The order in which "auto" tries kernels and strategies, by class of device: measured where ``measured`` says on what, elsewhere
with the reason that stands in for a measurement. It takes the first that can compute a request."""

from typing import NamedTuple

from jax_core.kernels.contract import Problem


class Row(NamedTuple):
    """``order`` applies from ``q_length`` query positions in one call of a kernel (``Problem.q_length``)."""

    q_length: int
    order: tuple[str, ...]
    reason: str


class Gpus(NamedTuple):
    """A class of GPUs. ``capabilities``: theirs, as ``Problem.capability``. ``measured``: on which of them; None: on none."""

    name: str
    capabilities: frozenset[int]
    measured: str | None
    kernels: tuple[Row, ...]
    strategies: tuple[Row, ...]


# H200, bfloat16, 32:8 heads of dim 128, zigzag, causal, from torch; TFLOP/s per GPU, forward / forward and backward
# (benchmarks/results/2026-11-22-ring-4xH200, 2026-11-22-one-gpu-*, 2026-11-22-ring-alone-of-8).
_KERNELS_ON_H200 = (
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


# As above, on four GPUs with the kernels above (benchmarks/results/2026-11-22-strategies-*; docs/strategies.md).
_STRATEGIES_ON_H200 = (
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
_NO_FLASH_ATTN_4 = (
    Row(
        4096,
        ("cuda", "triton", "xla"),
        "an H200's order without flash-attn-4, of which no class is called on them: cuDNN's kernels are written for each "
        "generation, Triton's tiles were measured on an H200 alone",
    ),
    Row(0, ("triton", "cuda", "xla"), "as on an H200, where Triton is before cuDNN in short shards"),
)
_BLACKWELL = (
    Row(
        512,
        ("cuda", "triton", "xla"),
        "cuDNN's kernels are written for this generation's matrix units, Triton's tiles here are an H200's, and flash-attn-4's "
        "classes for sm_100 are not called (docs/contributing/a-kernel.md)",
    ),
    Row(0, ("triton", "cuda", "xla"), "decoding reads memory and multiplies little: as on an H200"),
)
_STRATEGIES_ELSEWHERE = tuple(
    row._replace(reason="as on an H200: slower kernels hide more of a transfer, slower links need more of it hidden")
    for row in _STRATEGIES_ON_H200
)

ON_GPUS = (
    Gpus("H100, H200", frozenset({90}), "H200", _KERNELS_ON_H200, _STRATEGIES_ON_H200),
    Gpus("A100, RTX, L40S", frozenset({80, 86, 87, 89, 120, 121}), None, _NO_FLASH_ATTN_4, _STRATEGIES_ELSEWHERE),
    Gpus("B200, B300", frozenset({100, 103, 110}), None, _BLACKWELL, _STRATEGIES_ELSEWHERE),
)


def gpus_of(problem: Problem) -> Gpus:
    """The class of the problem's GPU; the one that was measured if it is not known."""
    return next((gpus for gpus in ON_GPUS if problem.capability in gpus.capabilities), ON_GPUS[0])


def _row(rows: tuple[Row, ...], problem: Problem) -> Row:
    return next(row for row in rows if problem.q_length >= row.q_length)


def preferred_kernels(problem: Problem) -> tuple[str, ...]:
    if problem.backend != "gpu":
        return ("pallas", "xla") if problem.backend == "tpu" else ("xla",)  # not measured: no TPU was available
    return _row(gpus_of(problem).kernels, problem).order


def why_these_kernels(problem: Problem) -> str:
    """Why "auto" tries them in the order of :func:`preferred_kernels`."""
    if problem.backend != "gpu":
        return "the only ones there are for this backend; nothing was measured"
    gpus = gpus_of(problem)
    measured = f"measured on {gpus.measured}" if gpus.measured else f"not measured on {gpus.name}"
    return f"{measured}: {_row(gpus.kernels, problem).reason}"


GATHERED_AT_MOST = 32768  # positions of the whole sequence; its memory grows with the ring


def preferred_strategies(problem: Problem, windowed: tuple[str, ...]) -> tuple[str, ...]:
    """The order in which "auto" tries strategies. ``windowed``: those that send no more than a window's edges (at 64k tokens with a
    window of 4096 on four GPUs all-gather is 1.16 to 1.39 times as fast as the ring). The fused ring, which has never run on a
    TPU, is taken by name only."""
    if problem.backend == "gpu" and problem.size > 1:
        if windowed:
            return *windowed, "ring"
        if problem.size * problem.k_length <= GATHERED_AT_MOST:
            return _row(gpus_of(problem).strategies, problem).order
    return ("ring",)
