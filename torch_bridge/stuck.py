"""Which rings can never go on, from what every rank says of its calls. Pure functions, which the coordinator calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Of a rank's wait limit: when it asks where the others are, and when it no longer waits for one that is in no ring call. The rest
# is for the question and the answers, so that all have ended within the limit.
ASK_AFTER, GIVE_UP_AFTER = 0.25, 0.75

Ranks = tuple[int, ...]


class Standing(NamedTuple):
    """One rank's calls of one ring.

    ``number``: of its last call, counted from 1. ``waits``: seconds since that call began, None once it has ended. ``calls``: a
    digest of what it asked for in its last calls, by their numbers. ``last``: the last call in words.
    """

    number: int
    waits: float | None
    calls: dict[int, str]
    last: str


class Report(NamedTuple):
    """What a rank says of itself. ``idle``: seconds for which it has been in no call of any ring, 0 while it is in one or prepares
    one. ``place``: what its main thread does, in words. ``limit``: seconds for which it waits for an idle rank."""

    limit: float
    idle: float
    place: str
    rings: dict[Ranks, Standing]

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> "Report":
        rings = {
            tuple(ring): Standing(number, waits, {int(key): digest for key, digest in calls.items()}, last)
            for ring, (number, waits, calls, last) in message["rings"]
        }
        return cls(float(message["limit"]), float(message["idle"]), str(message["place"]), rings)

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "rings": list(self.rings.items())}


@dataclass(frozen=True)
class _World:
    """All reports, and of each ring whose ranks ask for different things the number of the first such call."""

    reports: Mapping[int, Report]
    apart: Mapping[Ranks, int]

    def waits(self, rank: int, share: float) -> list[Ranks]:
        """The rings in which ``rank`` has waited for this share of its limit."""
        report = self.reports[rank]
        return [ring for ring, own in report.rings.items() if own.waits is not None and own.waits >= share * report.limit]

    def behind(self, rank: int, ring: Ranks) -> set[int]:
        """The members of the ring that have not come to the call that ``rank`` is in."""
        number = self.reports[rank].rings[ring].number
        return {other for other in ring if other in self.reports and self._number(other, ring) < number}

    def _number(self, rank: int, ring: Ranks) -> int:
        standing = self.reports[rank].rings.get(ring)
        return standing.number if standing else 0

    def goes_on(self, rank: int, free: set[int]) -> bool:
        """Whether this rank will end what it does, when those in ``free`` do."""
        report = self.reports[rank]
        calls = [ring for ring, own in report.rings.items() if own.waits is not None]
        if not calls:
            return report.idle < GIVE_UP_AFTER * report.limit
        return all(ring not in self.apart and self.behind(rank, ring) <= free for ring in calls)


def stuck_rings(reports: Mapping[int, Report]) -> dict[Ranks, str]:
    """The rings that can never go on, and why, by what each of the ranks says.

    A rank in a ring call waits for the members that have not come to it. One that is busy (in a call that all its members are in,
    however long; compiling; idle for less than its limit) will come; one that waits for such ranks alone will come too. Whoever is
    left waits for an idle rank, or in a circle. Ranks whose calls of one number differ never meet.
    """
    rings = {ring for report in reports.values() for ring in report.rings}
    apart = {ring: number for ring in rings if (number := _first_apart(ring, reports)) is not None}
    world = _World(reports, apart)
    free: set[int] = set()
    while more := {rank for rank in reports if rank not in free and world.goes_on(rank, free)}:
        free |= more
    found: dict[Ranks, str] = {}
    for rank in reports:
        found |= {
            ring: f"its ranks have made call {apart[ring]} differently" for ring in world.waits(rank, ASK_AFTER) if ring in apart
        }
        late = (ring for ring in world.waits(rank, GIVE_UP_AFTER) if not world.behind(rank, ring) <= free)
        found |= {ring: _absent(world.behind(rank, ring) - free) for ring in late if ring not in found}
    return found


def _first_apart(ring: Ranks, reports: Mapping[int, Report]) -> int | None:
    asked: dict[int, set[str]] = {}
    for rank in ring:
        standing = reports[rank].rings.get(ring) if rank in reports else None
        for number, digest in standing.calls.items() if standing else ():
            asked.setdefault(number, set()).add(digest)
    return min((number for number, digests in asked.items() if len(digests) > 1), default=None)


def _absent(ranks: Iterable[int]) -> str:
    return f"{named(ranks)} did not come"


def named(ranks: Iterable[int]) -> str:
    """``global rank 3``, ``global ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"global rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"


def asked_for(ring: Ranks, reports: Mapping[int, Report]) -> str:
    """What every member of the ring last asked for, and what it does now; members that say the same are named together."""
    saying: dict[str, list[int]] = {}
    for rank in ring:
        if rank in reports:
            saying.setdefault(_said(reports[rank], ring), []).append(rank)
    return "; ".join(f"{named(ranks)}: {words}" for words, ranks in saying.items())


def _said(report: Report, ring: Ranks) -> str:
    standing = report.rings.get(ring)
    if standing is None:
        return f"never called this ring; {report.place}"
    call = f"call {standing.number}, {standing.last}"
    return f"in {call}" if standing.waits is not None else f"{call}, which has ended; {report.place}"
