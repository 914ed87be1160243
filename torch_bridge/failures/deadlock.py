"""Finds the rings that can never continue from every rank's report of its calls. Pure functions, called by the coordinator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Shares of a rank's wait limit: when it asks for the state of the others, and when it stops waiting for one that is in no ring
# call. The rest is for the question and the answers, so that all have ended within the limit.
ASK_AFTER, GIVE_UP_AFTER = 0.25, 0.75

ALL_CALL = (
    'Every rank of a ring must make the same calls in the same order; ring_attn.start(check="every_call") finds the first that '
    "differs. Where a rank rightly pauses between its calls, as for a checkpoint, give all ranks more time with "
    "ring_attn.start(wait_timeout=seconds)."
)
ALL_LAUNCHED = (
    "Every rank of the ring has given this call to its device, or is about to, and it does not come to its end: a kernel that "
    "waits for ever, a collective of NCCL that another process never joins, a driver that does not return, or a fault of the "
    "hardware; py-spy dump and cuda-gdb show where it is. Where a device rightly takes longer, give it more time with "
    "ring_attn.start(device_timeout=seconds)."
)

Ranks = tuple[int, ...]


class RingStatus(NamedTuple):
    """One rank's calls of one ring.

    ``number``: that of its last call, counted from 1. ``waits``: seconds since that call began, None once it has ended. ``calls``:
    digests of its most recent calls, by their numbers. ``last``: a description of the last call. ``launched``: the number of the
    last call that its device was given, if it has one, ``since`` so many seconds.
    """

    number: int
    waits: float | None
    calls: dict[int, str]
    last: str
    launched: int = 0
    since: float = 0.0


class Stalled(NamedTuple):
    """A call of a ring that a rank's device has not finished within the limit: its number, a description, and for how long the
    device has finished none, which may be so for ``limit`` seconds once all of the ring have launched it. ``in_host``: it is the
    host that has been in the call for so long, without compiling anything."""

    ring: Ranks
    number: int
    what: str
    seconds: float
    limit: float
    in_host: bool = False

    def __str__(self) -> str:
        if self.in_host:
            return f"has been in call {self.number}, {self.what}, for {self.seconds:.0f} s, and compiles nothing"
        return f"has not finished call {self.number}, {self.what}, nor any other for {self.seconds:.0f} s"


Message = Mapping[str, Any]  # between processes: a JSON object, whose keys say what it is


class RankStatus(NamedTuple):
    """A rank's report about itself. ``idle``: seconds for which it has been in no ring call, 0 while it is in one or prepares one.
    ``place``: a description of what its main thread does. ``limit``: seconds for which it waits for an idle rank.
    ``reported``: False where it has never reported, and this is assumed of it. ``stalled``: what its device does not finish, or
    its host."""

    limit: float
    idle: float
    place: str
    rings: dict[Ranks, RingStatus]
    stalled: Stalled | None = None
    reported: bool = True

    @classmethod
    def from_json(cls, message: Message) -> "RankStatus":
        stalled = message["stalled"] and Stalled(tuple(message["stalled"][0]), *message["stalled"][1:])
        rings = cls.of_calls(message["rings"]).rings
        return cls(float(message["limit"]), float(message["idle"]), str(message["place"]), rings, stalled)

    @classmethod
    def of_calls(cls, statuses: Any) -> "RankStatus":
        """What a rank that goes on tells of its calls alone, as ``list(rings.items())``."""
        rings = {
            tuple(ring): RingStatus(
                int(number),
                None if waits is None else float(waits),
                {int(key): str(digest) for key, digest in calls.items()},
                str(last),
                int(launched),
                float(since),
            )
            for ring, (number, waits, calls, last, launched, since) in statuses
        }
        return cls(0.0, 0.0, "it goes on", rings)

    def to_json(self) -> dict[str, object]:
        return {**self._asdict(), "rings": list(self.rings.items())}


@dataclass(frozen=True)
class _World:
    """All reports and, for each ring whose ranks make different calls, the number of the first call that differs."""

    reports: Mapping[int, RankStatus]
    mismatched: Mapping[Ranks, int]

    def waits(self, rank: int, share: float) -> list[Ranks]:
        """The rings in which ``rank`` has waited for at least this share of its limit."""
        report = self.reports[rank]
        return [ring for ring, status in report.rings.items() if status.waits is not None and status.waits >= share * report.limit]

    def behind(self, rank: int, ring: Ranks) -> set[int]:
        """The members of the ring that have not reached the call that ``rank`` is in."""
        number = self.reports[rank].rings[ring].number
        return {other for other in ring if other in self.reports and self._number(other, ring) < number}

    def _number(self, rank: int, ring: Ranks) -> int:
        status = self.reports[rank].rings.get(ring)
        return status.number if status else 0

    def goes_on(self, rank: int, free: set[int]) -> bool:
        """Whether this rank will finish what it is doing, provided that those in ``free`` do."""
        report = self.reports[rank]
        calls = [ring for ring, status in report.rings.items() if status.waits is not None]
        if not calls:
            return report.idle < GIVE_UP_AFTER * report.limit
        return all(ring not in self.mismatched and self.behind(rank, ring) <= free for ring in calls)


def deadlocked_rings(reports: Mapping[int, RankStatus]) -> dict[Ranks, str]:
    """The rings that can never continue, each with the reason, derived from the reports of all ranks.

    A rank in a ring call waits for the members that have not reached it. A busy rank (in a call that all its members have joined,
    however long it takes; compiling; idle for less than its limit) will arrive, and so will a rank that waits only for such ranks.
    Any other rank waits for an idle rank or in a cycle. Ranks whose calls with the same number differ never meet.
    """
    rings = {ring for report in reports.values() for ring in report.rings}
    mismatched = {ring: number for ring in rings if (number := _first_mismatch(ring, reports)) is not None}
    world = _World(reports, mismatched)
    free: set[int] = set()
    while more := {rank for rank in reports if rank not in free and world.goes_on(rank, free)}:
        free |= more
    reasons = crossed_rings(reports)
    for rank in reports:
        reasons |= {ring: _mismatch_message(mismatched[ring]) for ring in world.waits(rank, ASK_AFTER) if ring in mismatched}
        late = (ring for ring in world.waits(rank, GIVE_UP_AFTER) if not world.behind(rank, ring) <= free)
        reasons |= {ring: _absent(world.behind(rank, ring) - free) for ring in late if ring not in reasons}
    return reasons


def crossed_rings(reports: Mapping[int, RankStatus]) -> dict[Ranks, str]:
    """The rings whose ranks have made calls with the same number differently that have ended all the same, with the reason: each
    was paired with another call, and the results are wrong."""
    rings = {ring for report in reports.values() for ring in report.rings}
    return {ring: _mismatch_message(number) for ring in rings if (number := _first_mismatch(ring, reports, ended=True)) is not None}


def stalled_rings(reports: Mapping[int, RankStatus]) -> dict[Ranks, str]:
    """The rings in whose call a device, or a host, stays for its limit though all members have given it to their devices or stay
    in it too, each with the reason. ``reports``: of the ranks that answer; where a member does not, or has not come to the call,
    nobody is at fault."""
    reasons: dict[Ranks, str] = {}
    for rank, report in reports.items():
        stalled = report.stalled
        if stalled is not None and all(_takes_part(reports.get(member), stalled) for member in stalled.ring):
            reasons.setdefault(stalled.ring, f"the {'host' if stalled.in_host else 'device'} of {named([rank])} {stalled}")
    return reasons


def _takes_part(report: RankStatus | None, stalled: Stalled) -> bool:
    """Whether this rank has launched the call as long ago, or stays in it itself."""
    status = None if report is None else report.rings.get(stalled.ring)
    if report is None or status is None:
        return False
    own = report.stalled
    stays = own is not None and own.in_host and own.ring == stalled.ring and own.number >= stalled.number
    return stays or (status.launched >= stalled.number and status.since >= stalled.limit)


def _first_mismatch(ring: Ranks, reports: Mapping[int, RankStatus], ended: bool = False) -> int | None:
    """The first call that differs. ``ended``: only calls that have completed; a call in progress may be a comparison, which finds
    the difference itself."""
    asked: dict[int, set[str]] = {}
    for rank in ring:
        status = reports[rank].rings.get(ring) if rank in reports else None
        for number, digest in status.calls.items() if status else ():
            if not (ended and status and number == status.number and status.waits is not None):
                asked.setdefault(number, set()).add(digest)
    return min((number for number, digests in asked.items() if len(digests) > 1), default=None)


def _mismatch_message(number: int) -> str:
    return f"its ranks have made call {number} differently"


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


def asked_for(ring: Ranks, reports: Mapping[int, RankStatus]) -> str:
    """What every member of the ring last called, and what it is doing now; members with the same answer are listed together."""
    saying: dict[str, list[int]] = {}
    for rank in ring:
        if rank in reports:
            saying.setdefault(_said(reports[rank], ring), []).append(rank)
    return "; ".join(f"{named(ranks)}: {words}" for words, ranks in saying.items())


def _said(report: RankStatus, ring: Ranks) -> str:
    status = report.rings.get(ring)
    if status is None:
        return f"never called this ring; {report.place}" if report.reported else report.place
    call = f"call {status.number}, {status.last}"
    return f"in {call}" if status.waits is not None else f"{call}, which has ended; {report.place}"
