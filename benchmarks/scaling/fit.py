"""Fits the cost model's figures to measured times, by least squares of the logarithms of predicted over measured."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from benchmarks.scaling.costs import DIRECTIONS, Kernel, Link, Machine, Pass, both, estimate
from benchmarks.scaling.rows import Measured

# Not fitted: no committed run on one or two GPUs shows them.
ASSUMED = {
    "memory": "4.8 TB/s: NVIDIA's data sheet of the H200. Fitted bytes of joining are relative to it",
    "host_size": "8 GPUs",
    "inside.bandwidth": "294 GB/s one way: NCCL send/recv round a ring of eight H200, 256 MiB, measured once, not committed",
    "between.bandwidth": "50 GB/s: an adapter of 400 Gbit/s for each GPU",
    "between.latency": "30 us: a guess; it matters only where a GPU holds few tokens",
    "inside.latency": "10 us: a guess, likewise",
}
INSIDE, BETWEEN = Link(294e9, 10e-6), Link(50e9, 30e-6)
MEMORY, HOST_SIZE = 4.8e12, 8
# Where the search begins, which is also the scale of each figure.
START = Pass(1.4e-15, 1e-13, 100.0, 20e-6, 10.0, 0.3e-3, 0.8e-3)
SHARED = {"sharing": 0.1, "sustained": 1.1}
SHARING_LIMIT = 32 / 132  # NCCL's channels, a multiprocessor each, of those of an H200
NAMES = tuple(field.name for field in fields(Pass))


class Bench(NamedTuple):
    """What a measured time depends on beside the machine. ``sample``: seconds that the wall clock adds to a sample. ``warming``:
    seconds at work after which a rested GPU is 63 % of the way to its sustained pace. ``warm``: by results, how far it was when a
    sample began; 0 in those of one GPU (or the first), whose samples begin rested, by definition."""

    sample: float
    warming: float
    warm: dict[str, float]


class Fit(NamedTuple):
    """``errors``: the standard error of each figure, relative to it, as far as the results tell."""

    machine: Machine
    bench: Bench
    errors: dict[str, float]


def predicted(machine: Machine, bench: Bench, row: Measured) -> float:
    """Milliseconds."""
    if row.still_ms is not None:
        return row.still_ms + estimate(machine, row.platform, row.call, row.phase).waiting * 1000
    rested = _timed(replace(machine, sustained=1.0), bench, row)
    cool = (1 - bench.warm.get(row.results, 0.0)) * np.exp(-rested * row.calls / 1000 / bench.warming)
    pace = machine.sustained + (1 - machine.sustained) * float(cool)
    return _timed(replace(machine, sustained=pace), bench, row)


def _timed(machine: Machine, bench: Bench, row: Measured) -> float:
    both_ways = row.phase == "both"
    times = both(machine, row.platform, row.call) if both_ways else estimate(machine, row.platform, row.call, row.phase)
    started = bench.sample / row.calls if row.by_clock else 0.0
    device = times.device - times.waiting if row.alone else times.device
    return 1000 * (device + started if row.in_jax else times.total)


def fit(rows: Sequence[Measured]) -> Fit:
    platforms = sorted({row.platform for row in rows})
    results = sorted({row.results for row in rows}, key=lambda name: ("one-gpu" not in name, name))
    results = [name for name in results[1:] if "one-gpu" not in name]
    names = [f"{platform}.{way}.{name}" for platform in platforms for way in DIRECTIONS for name in NAMES]
    names += [*SHARED, "sample", "warming", *(f"warm.{name}" for name in results)]
    start = [getattr(START, name) for _ in platforms for _ in DIRECTIONS for name in NAMES]
    scale = np.array([*start, *SHARED.values(), 1e-3, 0.1, *(0.5 for _ in results)])
    weights = np.array([1 / (0.02 + row.spread) for row in rows])

    def residuals(x: np.ndarray) -> np.ndarray:
        machine, bench = unpacked(platforms, results, x * scale)
        return weights * np.array([np.log(predicted(machine, bench, row) / row.ms) for row in rows])

    limits = {"sharing": (0.0, SHARING_LIMIT), "sustained": (1.0, 2.0)} | {f"warm.{name}": (0.0, 1.0) for name in results}
    lower, upper = np.array([limits.get(name, (0.0, np.inf)) for name in names]).T / scale
    found = least_squares(residuals, np.ones(len(scale)), bounds=(lower - 1e-9, upper), x_scale="jac", max_nfev=400)
    errors = standard_errors(found)
    # A figure that no time depends on is 0 rather than where the search began.
    rounded = [float(f"{value:.4g}") if np.isfinite(spread) else 0.0 for value, spread in zip(found.x * scale, errors, strict=True)]
    return Fit(*unpacked(platforms, results, np.array(rounded)), dict(zip(names, errors, strict=True)))


def unpacked(platforms: Sequence[str], results: Sequence[str], x: np.ndarray) -> tuple[Machine, Bench]:
    numbers = iter(max(0.0, float(value)) for value in x)
    passes = {platform: [Pass(*islice(numbers, len(NAMES))) for _ in DIRECTIONS] for platform in platforms}
    kernels = {platform: Kernel(*both_ways) for platform, both_ways in passes.items()}
    sharing, sustained, sample, warming, *warm = numbers
    machine = Machine(MEMORY, sharing, sustained, HOST_SIZE, INSIDE, BETWEEN, kernels)
    return machine, Bench(sample, warming, dict(zip(results, warm, strict=True)))


def standard_errors(found: Any) -> list[float]:
    """Relative to each figure; infinite for those that the residuals do not depend on."""
    _, sizes, axes = np.linalg.svd(found.jac, full_matrices=False)
    variance = 2 * found.cost / max(1, len(found.fun) - len(found.x))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(variance * np.sum((axes.T / sizes) ** 2, axis=1)) / found.x
    seen = np.abs(found.jac).sum(0) > 0
    return [float(value) for value in np.where(seen & np.isfinite(spread), spread, np.inf)]


def error(machine: Machine, bench: Bench, row: Measured) -> float:
    """Predicted over measured, less 1."""
    return predicted(machine, bench, row) / row.ms - 1
