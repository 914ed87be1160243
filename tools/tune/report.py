"""What the command prints."""

from collections.abc import Iterable, Sequence

from jax_core.request.dispatch import KERNELS
from jax_core.tune.lookup import origins
from jax_core.tune.search import formatted
from jax_core.tune.table import PASSES
from tools.tune.work import Done, Work


def line(done: Done) -> str:
    return "\n    ".join((f"{done.work.name} ({done.work.key})", *_lines(done)))


def _lines(done: Done) -> Iterable[str]:
    if done.failed:
        yield f"not searched: {done.failed}"
    for way, result in done.results.items():
        tuned = result.tuned
        best = "nothing found" if tuned is None else f"{formatted(tuned.params)} in {tuned.ms:.3f} ms{_won(tuned.gain)}"
        yield f"{way}: {result.tried} of {result.listed} tried; {best}"
        yield from (f"{way}: dropped {reason}" for reason in result.dropped)


def _won(gain: float | None) -> str:
    return ", where the kernel's own choice could not run" if gain is None else f", {gain:.1f} % won"


def summary(all_done: Sequence[Done]) -> str:
    """A table of what was found, and what it won over the heuristic."""
    rows = [("for", "pass", "heuristic", "ms", "found", "ms", "won")]
    for done in all_done:
        for way, result in done.results.items():
            if (tuned := result.tuned) is None:
                continue
            default = "-" if tuned.heuristic_ms is None else f"{tuned.heuristic_ms:.3f}"
            won = "-" if tuned.gain is None else f"{tuned.gain:.1f} %"
            rows.append(
                (done.work.name, way, formatted(result.heuristic), default, formatted(tuned.params), f"{tuned.ms:.3f}", won)
            )
    return _aligned(rows)


def plan(works: Sequence[Work]) -> str:
    """What would be searched; ``shapes``: how many of those that were asked for share the configuration."""
    rows = [(work.name, str(work.also + 1), str(work.candidates), work.key) for work in works]
    return _aligned([("for", "shapes", "candidates", "key"), *rows])


def used(works: Sequence[Work], device: str) -> str:
    """What each would be computed with now, and where that comes from."""
    rows = [("for", "pass", "configuration", "from", "won", "found")]
    for work in works:
        there, defaults = origins(work.key, device), KERNELS[work.platform].default_params(work.problem)
        for way, default in zip(PASSES, defaults, strict=True):
            if way not in there:
                rows.append((work.name, way, formatted(default), "heuristic", "", ""))
                continue
            tuned, place = there[way]
            won = "-" if tuned.gain is None else f"{tuned.gain:.1f} %"
            rows.append((work.name, way, formatted(tuned.params), place, won, tuned.day))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
