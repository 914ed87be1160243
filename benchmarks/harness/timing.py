"""Times several systems side by side: they take turns, so that changes of the clocks affect all of them alike.

torch.utils.benchmark and triton.testing.do_bench time one function after another, in one process, on a GPU that is as warm as the
previous one left it. Here systems alternate, each sample begins on a rested GPU, and the ranks of a ring start it together.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.team import ON_GPU, Team

HEAD_START = 4_000_000  # clock cycles, about 2 ms
FIRST_IS_ENOUGH_MS = 1000.0
REST = 0.1  # seconds before a sample: a GPU at its power limit is slower after a system that draws much power


@dataclass(frozen=True)
class Timed:
    """A call and how it is timed: by CUDA events on torch's stream, or by the wall clock until `wait` on its result returns.

    A call that computes on another stream can be timed by events too, and then costs what it costs on torch's: after `begin` its
    work waits for torch's stream, and after `end` on its result torch's stream waits for that."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] | None = None
    begin: Callable[[], Any] | None = None
    end: Callable[[Any], Any] | None = None

    @property
    def by_events(self) -> bool:
        return ON_GPU and (self.wait is None or self.end is not None)


@dataclass(frozen=True)
class Times:
    """Milliseconds per call: each sample is the mean of several back-to-back calls."""

    samples: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def figures(self) -> dict[str, float | str]:
        spread = (max(self.samples) - min(self.samples)) / self.median
        return {"ms": self.median, "spread": round(spread, 3), "samples": f"{len(self.samples)} x {self.calls}"}


def sample(timed: Timed, calls: int) -> float:
    return by_events(timed, calls) if timed.by_events else by_wall_clock(timed, calls)


def by_wall_clock(timed: Timed, calls: int) -> float:
    if ON_GPU:
        torch.cuda._sleep(HEAD_START)  # as for events, so that the clocks rise again
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        result = timed.call()
    if timed.wait is not None:
        timed.wait(result)
    return (time.perf_counter() - start) * 1000 / calls


def by_events(timed: Timed, calls: int) -> float:
    """The GPU sleeps first, so that the host runs ahead of it: the host's time shows only if the host is slower."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    if timed.begin is not None:
        timed.begin()
    for _ in range(calls):
        result = timed.call()
    if timed.end is not None:
        timed.end(result)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def take_turns(
    team: Team, systems: dict[str, Timed], rounds: int, sample_ms: float
) -> tuple[dict[str, Times], dict[str, Exception]]:
    """The times of each system, and the reasons for failures. Each system was called before, so it is compiled.

    A sample is as many calls as fill `sample_ms`. The order is reversed every other round: none always follows the same one.
    """
    failed: dict[str, Exception] = {}
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            if name in failed:
                continue
            try:
                if name in calls:
                    value = rested_sample(team, systems[name], calls[name])
                else:
                    calls[name], value = first_sample(team, systems[name], sample_ms)
                samples[name].append(value)
            except Exception as error:  # the others continue
                failed[name] = error
            if not team.agreed(name not in failed):
                failed.setdefault(name, RuntimeError("it failed on another rank"))
    return {name: Times(tuple(samples[name]), calls[name]) for name in systems if name not in failed}, failed


def rested_sample(team: Team, timed: Timed, calls: int) -> float:
    if ON_GPU:
        torch.cuda.synchronize()
        time.sleep(REST)
    team.ready()
    return sample(timed, calls)


def first_sample(team: Team, timed: Timed, sample_ms: float) -> tuple[int, float]:
    """How many calls fill a sample, and one such sample. A first call may be slow, so the second one decides, unless calls take
    very long. These two need no rest: they only count."""
    team.ready()
    first = sample(timed, 1)
    once = team.slowest(first)
    if once >= max(sample_ms, FIRST_IS_ENOUGH_MS):
        return 1, first
    team.ready()
    once = min(once, team.slowest(sample(timed, 1)))
    calls = max(1, min(200, round(sample_ms / max(once, 1e-3))))
    return calls, rested_sample(team, timed, calls)


def reason(error: BaseException) -> str:
    """The error, shortened to fit in a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
