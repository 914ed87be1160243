"""Times programs side by side, as benchmarks/harness/timing.py does: they take turns, each sample begins on a rested GPU, and every
other round goes backwards, so that changes of the clocks affect all of them alike."""

import statistics
import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

import jax

from jax_core.tune.programs import Program

ROUNDS = 5
REST = 0.1  # seconds: a GPU at its power limit is slower after a program that draws much power
T = TypeVar("T", bound=Hashable)


def take_turns(programs: Mapping[T, Program], rounds: int, rest: float) -> dict[T, float]:
    """The median milliseconds of each. All were called before, so they are compiled and loaded."""
    samples: dict[T, list[float]] = {name: [] for name in programs}
    for number in range(rounds):
        for name in list(programs)[:: -1 if number % 2 else 1]:
            time.sleep(rest)
            samples[name].append(milliseconds(programs[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def milliseconds(program: Program) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return (time.perf_counter() - start) * 1000
