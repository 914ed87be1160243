"""Times of several systems side by side: they take turns, so that what happens to the clocks happens to all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
HEAD_START = 4_000_000  # clock cycles, about 2 ms
FIRST_IS_ENOUGH_MS = 1000.0
REST = 0.1  # seconds before a sample: a card at its power limit is slower after a hungry neighbour than after a modest one


@dataclass(frozen=True)
class Timed:
    """A call and how it is timed: by CUDA events on torch's stream, or by the wall clock until `finished` says it is done."""

    call: Call
    finished: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: each sample is the mean of several calls, one after another without a pause."""

    samples: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def figures(self) -> dict[str, Any]:
        spread = (max(self.samples) - min(self.samples)) / self.median
        return {"ms": self.median, "spread": round(spread, 3), "samples": f"{len(self.samples)} x {self.calls}"}


def on_host(timed: Timed, calls: int) -> float:
    if torch.cuda.is_available():
        torch.cuda._sleep(HEAD_START)  # as on_device: the clocks rise again
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        result = timed.call()
    if timed.finished is not None:
        timed.finished(result)
    return (time.perf_counter() - start) * 1000 / calls


def on_device(timed: Timed, calls: int) -> float:
    """A pause of the device lets the host run ahead first, so the host's time shows only where it is the slower one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(calls):
        timed.call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def sample(timed: Timed, calls: int) -> float:
    by_events = timed.finished is None and torch.cuda.is_available()
    return on_device(timed, calls) if by_events else on_host(timed, calls)


class Alone:
    """One process: nobody to wait for, nobody to agree with."""

    def ready(self) -> None:
        pass

    def slowest(self, ms: float) -> float:
        return ms

    def agreed(self, fine: bool) -> bool:
        return fine


ALONE = Alone()


def take_turns(
    systems: dict[str, Timed], rounds: int, sample_ms: float, team: Any = ALONE
) -> tuple[dict[str, Times], dict[str, Exception]]:
    """The times of each system, and why those that failed did. Each was called before, so that it is compiled.

    A sample is as many calls as fill `sample_ms`. The order turns round every other round: none always follows the same one.
    `team`: what several processes need to do this together (an Alone, or one with its methods).
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
                    value = one_sample(systems[name], calls[name], team)
                else:
                    calls[name], value = first_sample(systems[name], sample_ms, team)
                samples[name].append(value)
            except Exception as error:  # the others go on
                failed[name] = error
            if not team.agreed(name not in failed):
                failed.setdefault(name, RuntimeError("it failed on another rank"))
    return {name: Times(tuple(samples[name]), calls[name]) for name in systems if name not in failed}, failed


def one_sample(timed: Timed, calls: int, team: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        time.sleep(REST)
    team.ready()
    return sample(timed, calls)


def first_sample(timed: Timed, sample_ms: float, team: Any) -> tuple[int, float]:
    """How many calls fill a sample, and one such sample. Only a very long call is not made again to find out: a first one may be
    slow."""
    first = one_sample(timed, 1, team)
    once = team.slowest(first)
    if once >= max(sample_ms, FIRST_IS_ENOUGH_MS):
        return 1, first
    once = min(once, team.slowest(one_sample(timed, 1, team)))
    calls = max(1, min(200, round(sample_ms / max(once, 1e-3))))
    return calls, one_sample(timed, calls, team)


def reason(error: BaseException) -> str:
    """Short enough for a table."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:300]}"
