"""A system that is tried before it is timed: its results are compared with the first one's."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from benchmarks.harness.report import Report
from benchmarks.harness.systems import difference
from benchmarks.harness.team import Team
from benchmarks.harness.timing import reason

System = TypeVar("System")


def checked(
    team: Team, report: Report, case: str, name: str, make: Callable[[], tuple[System, list[Tensor]]], truth: list[Tensor]
) -> System | None:
    """What ``make`` makes, with its whole results, which go to ``truth`` if they are the first; None on all ranks if that fails on
    one."""
    made, problem, error = None, None, 0.0
    try:
        made, found = make()
        truth.extend([] if truth else found)
        error = difference(found, truth)
    except Exception as failure:
        problem = reason(failure)
    if team.agreed(problem is None):
        report.add(case=case, system=name, phase="check", error=error)
        return made
    report.add(case=case, system=name, phase="check", failed=problem or "it failed on another rank")
    return None
