"""What the command prints."""

from collections.abc import Iterable, Sequence

from jax_core.request.dispatch import KERNELS
from jax_core.tune.lookup import origins
from jax_core.tune.search import in_words
from jax_core.tune.table import PASSES
from tools.tune.work import Done, Work


def line(done: Done) -> str:
    return "\n    ".join((f"{done.work.name} ({done.work.key})", *_lines(done)))


def _lines(done: Done) -> Iterable[str]:
    if done.failed:
        yield f"not searched: {done.failed}"
    for way, result in done.results.items():
        found = result.found
        best = "nothing found" if found is None else f"{in_words(found.params)} in {found.ms:.3f} ms{_won(found.gain)}"
        yield f"{way}: {result.tried} of {result.listed} tried; {best}"
        yield from (f"{way}: dropped {reason}" for reason in result.dropped)


def _won(gain: float | None) -> str:
    return ", where the kernel's own choice could not run" if gain is None else f", {gain:.1f} % won"


def summary(all_done: Sequence[Done]) -> str:
    """A table of what was found, and what it won over the heuristic."""
    rows = [("for", "pass", "heuristic", "ms", "found", "ms", "won")]
    for done in all_done:
        for way, result in done.results.items():
            if (found := result.found) is None:
                continue
            own = "-" if found.heuristic_ms is None else f"{found.heuristic_ms:.3f}"
            won = "-" if found.gain is None else f"{found.gain:.1f} %"
            rows.append((done.work.name, way, in_words(result.heuristic), own, in_words(found.params), f"{found.ms:.3f}", won))
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
        for way, own in zip(PASSES, defaults, strict=True):
            if way not in there:
                rows.append((work.name, way, in_words(own), "heuristic", "", ""))
                continue
            found, place = there[way]
            won = "-" if found.gain is None else f"{found.gain:.1f} %"
            rows.append((work.name, way, in_words(found.params), place, won, found.day))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
