"""A pass played through, event by event: each rank's compute, each link, and neighbours that wait for one another.

As the ring is implemented: a rank begins a stage when it has finished the one before, both computing and sending; a transfer begins
when both of its ends have begun its collective, and a rank's collective is done when it has sent and received. So one buffer is
under way ahead of the one in use, never more.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from jax_core.request.costs.machine import Machine
from jax_core.request.costs.plan import Stage, hop_times


def simulate(machine: Machine, stages: list[Stage]) -> float:
    """Seconds until the last of the ranks has finished."""
    return _Run(machine, stages).finished()


class _Event(NamedTuple):
    """``collective`` number of ``stage``: this ``rank`` begins it, or its transfer to the next rank has arrived."""

    time: float
    arrived: bool
    rank: int
    stage: int
    collective: int


@dataclass
class _Run:
    machine: Machine
    stages: list[Stage]
    events: list[_Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.stages[0].compute)
        self.durations = [[hop_times(self.machine, self.size, send) for send in stage.sends] for stage in self.stages]
        self.start = np.zeros(self.size)  # of the stage that the rank is in
        self.began: dict[tuple[int, int, int], float] = {}  # (stage, collective, rank)
        self.halves: dict[tuple[int, int, int], int] = {}  # how many of its two transfers are done
        self.ends = np.zeros(self.size)

    def finished(self) -> float:
        for rank in range(self.size):
            self.enter(rank, 0, 0.0)
        while self.events:
            time, arrived, rank, stage, collective = heappop(self.events)
            if arrived:
                for end in (rank, self.after(rank, stage, collective)):
                    self.half_done(end, stage, collective, time)
            else:
                self.begin(rank, stage, collective, time)
        return float(self.ends.max())

    def after(self, rank: int, stage: int, collective: int, sign: int = 1) -> int:
        return (rank + sign * self.stages[stage].sends[collective].hop) % self.size

    def enter(self, rank: int, stage: int, time: float) -> None:
        """Stages without a transfer pass at once."""
        while stage < len(self.stages) and not self.stages[stage].sends:
            time, stage = time + self.stages[stage].compute[rank], stage + 1
        self.start[rank] = self.ends[rank] = time
        if stage < len(self.stages):
            heappush(self.events, _Event(time, False, rank, stage, 0))

    def begin(self, rank: int, stage: int, collective: int, time: float) -> None:
        self.began[stage, collective, rank] = time
        for sender in {rank, self.after(rank, stage, collective, sign=-1)}:
            receiver = self.after(sender, stage, collective)
            if all((stage, collective, end) in self.began for end in (sender, receiver)):
                done = time + self.durations[stage][collective][sender]
                heappush(self.events, _Event(done, True, sender, stage, collective))

    def half_done(self, rank: int, stage: int, collective: int, time: float) -> None:
        key = stage, collective, rank
        self.halves[key] = self.halves.get(key, 0) + 1
        if self.halves[key] < 2:
            return
        if collective + 1 < len(self.stages[stage].sends):
            heappush(self.events, _Event(time, False, rank, stage, collective + 1))
        else:
            self.enter(rank, stage + 1, max(time, self.computed(rank, stage, time)))

    def computed(self, rank: int, stage: int, sent: float) -> float:
        """When the stage's kernels are done, if its transfers were under way until ``sent``."""
        done = (1 - self.machine.sharing) * (sent - self.start[rank])
        return sent + max(self.stages[stage].compute[rank] - done, 0.0)
