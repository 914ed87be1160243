"""What the parts of one run of benchmarks/ring/compare.py share."""

import argparse
import faulthandler
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.report import Report
from benchmarks.harness.systems import Case, Inputs, Prepared, difference, make_inputs
from benchmarks.harness.team import Team
from benchmarks.harness.timing import Timed, Times, reason, take_turns
from benchmarks.ring.systems import PEERS, SYSTEMS, YUNCHANG, Group


class Run:
    """The processes, the report and the remaining time. At the hard limit a process stops whatever it is waiting for, and torchrun
    stops the others; the report contains what was measured until then."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.start = time.monotonic()
        faulthandler.dump_traceback_later(options.hard_end, exit=True)
        self.team = Team(timeout=options.collective_timeout)
        self.report = Report(options.output if self.team.rank == 0 else None, f"Ring attention on {self.team.size} GPUs")
        self.peer_groups: dict[str, dist.ProcessGroup] = {}

    def group(self, system: str) -> dist.ProcessGroup:
        """Each peer has its own process group, so that a peer that fails midway does not break the others'."""
        world = dist.group.WORLD
        assert world is not None
        if system in PEERS and system not in self.peer_groups:
            self.peer_groups[system] = dist.new_group()
        return self.peer_groups.get(system, world)

    def say(self, text: str) -> None:
        self.report.say(f"[{time.monotonic() - self.start:5.1f} s] {text}")

    def may_begin(self, what: str) -> bool:
        """Whether there is time to begin something else; the same on all ranks."""
        begin = self.team.agreed(time.monotonic() - self.start < self.options.budget)
        self.say(what if begin else f"left out for lack of time: {what}")
        return begin

    def case(self, name: str, tokens: int, window: int | None = None) -> Case:
        heads, kv_heads, dim = self.options.heads
        return Case(name, tokens, heads, kv_heads, dim, window=window)

    def shards(self, tokens: int) -> Inputs:
        """This rank's shards of ``tokens`` tokens."""
        return make_inputs(self.case("", tokens), self.team.device, seed=self.team.rank)

    def prepare(
        self, case: Case, name: str, shards: Inputs, group: Group, truth: list[torch.Tensor] | None = None, **options: Any
    ) -> Prepared | None:
        """The system, called once in each way; None on all ranks, with the reason added to the report, if that fails.

        With ``truth``, its results are compared with those in it, or stored there if there are none yet."""
        made, problem, error = None, None, None
        truth = None if name == YUNCHANG else truth
        try:
            made = SYSTEMS[name](shards, group, **options)
            made.passes["both"].call()
            if truth is not None:
                found = made.results("both")
                truth.extend([] if truth else found)
                error = difference(found, truth)
        except Exception as failure:
            problem = reason(failure)
        if self.team.agreed(problem is None):
            if truth is not None:
                self.report.add(case=case.name, system=name, phase="check", error=error)
            return made
        if made is not None:
            made.opened.close()
        self.report.add(case=case.name, system=name, phase="check", failed=problem or "it failed on another rank")
        return None

    def take_turns(
        self, timed: dict[str, Timed], rounds: int, sample_ms: float = 0.0
    ) -> tuple[dict[str, Times], dict[str, Exception]]:
        return take_turns(self.team, timed, self.options.rounds or rounds, max(sample_ms, self.options.sample_ms))

    def add_times(self, case: Case, name: str, phase: str, taken: Times, ranks: int | None = None) -> float:
        """Adds the slowest rank's median; with ``ranks`` also the rate per GPU on that many ranks."""
        median = self.team.slowest(taken.median)
        rate = {"tflops": case.tflop(phase) / ranks / median * 1000} if ranks else {}
        self.report.add(case=case.name, system=name, phase=phase, **taken.figures() | {"ms": median} | rate)
        return median
