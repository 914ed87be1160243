"""What the programs of one GPU share: a case is prepared, checked and timed on every system, and no failure stops another."""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.report import Report, default_folder, gpus
from benchmarks.harness.systems import Case, Inputs, Prepared, difference, make_inputs
from benchmarks.harness.team import ON_GPU, Team, tidy
from benchmarks.harness.timing import Timed, Times, by_wall_clock, reason, sample, take_turns
from benchmarks.one_gpu.systems import SYSTEMS

SAME_BITS = ("triton", "cute, deterministic")  # what promises bit-identical results in every run


class Bench:
    """The report and the remaining time of a program."""

    def __init__(self, options: argparse.Namespace, title: str):
        self.options, self.team, self.start = options, Team(), time.monotonic()
        self.report = Report(options.output, title)

    def run(self, parts: Iterable[tuple[str, Callable[[], None]]], conclude: Callable[[], None]) -> None:
        """Runs the parts while there is time, draws conclusions, and writes everything."""
        for name, part in parts:
            elapsed = time.monotonic() - self.start
            late = elapsed > self.options.budget
            self.report.say(f"\n[{elapsed:5.1f} s] {name}{': left out for lack of time' if late else ''}")
            try:
                None if late else part()
            except Exception as error:
                self.report.add(case=name, system="", phase="", failed=reason(error))
            tidy()
        conclude()
        self.report.note("seconds", round(time.monotonic() - self.start, 1))
        self.report.finish()

    def measure(self, case: Case, systems: Iterable[str], phases: Iterable[str]) -> None:
        """Each system's error and rates; the first system that runs is what the others' errors are relative to."""
        case = shortened(case, self.options.scale)
        inputs, gradients = make_inputs(case, self.options.device), next(phase for phase in phases if phase != "forward")
        ready: dict[str, Prepared] = {}
        truth: list[torch.Tensor] | None = None
        for name in systems:
            prepared = self.prepare(name, case, inputs, gradients)
            if prepared is not None:
                found, ready[name] = prepared.results(gradients), prepared
                truth = truth or found
                self.note_error(case, name, difference(found, truth), prepared, gradients)
        for phase in phases:
            self.time(case, phase, {name: prepared.passes[phase] for name, prepared in ready.items()})
        if ready and not self.report.data.get("gpus_during"):
            self.report.note("gpus_during", gpus_at_work(next(iter(ready.values())).passes["forward"]))

    def prepare(self, name: str, case: Case, inputs: Inputs, gradients: str) -> Prepared | None:
        """The system, called once in both directions; None, with the reason added to the report, if that fails."""
        begin = time.monotonic()
        try:
            prepared = SYSTEMS[name](case, inputs)
            prepared.results(gradients)
        except Exception as error:  # a system that cannot do this, or is not installed, must not stop the others
            self.report.add(case=case.name, system=name, phase="check", failed=reason(error))
            return None
        self.report.say(f"{case.name:34} {name:26} ready after {time.monotonic() - begin:.1f} s")
        return prepared

    def note_error(self, case: Case, name: str, error: float, prepared: Prepared, gradients: str) -> None:
        same = {"equal bits": repeatable(prepared, gradients)} if name in SAME_BITS else {}
        self.report.add(case=case.name, system=name, phase="check", error=error, **same)

    def time(self, case: Case, phase: str, timed: dict[str, Timed]) -> None:
        times, failed = take_turns(self.team, timed, self.options.rounds, self.options.sample_ms)
        for name, taken in times.items():
            self.add_times(case, name, phase, timed[name], taken)
        for name, error in failed.items():
            self.report.add(case=case.name, system=name, phase=phase, failed=reason(error))

    def add_times(self, case: Case, system: str, phase: str, timed: Timed, taken: Times) -> None:
        """Beside times by events of another library's stream stands one by the wall clock, which must be a little longer."""
        tflops = case.tflop(phase) / taken.median * 1000
        wall = {"wall ms": by_wall_clock(timed, taken.calls)} if timed.by_events and timed.wait else {}
        self.report.add(case=case.name, system=system, phase=phase, tflops=tflops, **taken.figures(), **wall)


def arguments(description: str | None, name: str, **defaults: float) -> argparse.ArgumentParser:
    """What every program of one GPU takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, type=int)
    add("--rounds", default=int(defaults.get("rounds", 9)))
    add("--sample-ms", type=float, default=defaults.get("sample_ms", 20.0), help="how long one sample takes")
    add("--budget", type=float, default=420.0, help="seconds after which nothing more is begun")
    add("--scale", default=1, help="divide all lengths by this, to try the program out")
    add("--device", type=str, default="cuda" if ON_GPU else "cpu")
    add("--output", type=Path, default=default_folder(name))
    return parser


def gpus_at_work(timed: Timed) -> list[dict[str, str]]:
    """The clocks while the GPU is busy with about a second of queued calls."""
    once = max(sample(timed, 1), 0.1)
    for _ in range(min(500, int(1500 / once)) if ON_GPU else 0):
        timed.call()
    return gpus()


def shortened(case: Case, by: int) -> Case:
    if by == 1:
        return case
    documents = tuple(max(1, length // by) for length in case.documents)
    window = case.window and max(1, case.window // by)
    return replace(case, length=sum(documents) or case.length // by, window=window, documents=documents)


def repeatable(prepared: Prepared, gradients: str) -> str:
    once, again = prepared.results(gradients), prepared.results(gradients)
    return "yes" if all(torch.equal(a, b) for a, b in zip(once, again, strict=True)) else "NO"
