"""How far this process's GPU is with the ring calls that it was given, from the events that follow them.

A device makes its calls in order. So it is enough to look now and then whether the oldest that is remembered has ended: where not,
the device is in it, or in one after the last that is known to have ended. Of many calls that wait only a share is remembered.
"""

import time
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import torch

from torch_bridge.failures.events import ANSWER_WITHIN, Question, ask, let_go
from torch_bridge.mesh.rings import ProcessRing

_REMEMBERED = 256  # calls; as many as a queue of CUDA holds, and so many that have ended
_LOOKS = 8  # at events, in a limit's time: CUDA forbids them while another thread captures a graph
LASTING = 60.0  # seconds of a call after which its process says where it is; no two looks at a device are further apart
_KEPT = 5.0  # seconds without an answer after which the driver is taken to be kept from answering
_LONGEST_BEAT = 2.0  # seconds: a process that was stopped has not waited


class RingCall(Protocol):
    """``begun``: its start, by the monotonic clock; ``number``: counts the calls of its ring."""

    ring: ProcessRing
    begun: float
    number: int


class Unfinished(NamedTuple):
    """The oldest call that the device is known to be in or before, and the seconds for which it has ended none, at least."""

    call: RingCall
    seconds: float


class DeviceProgress:
    """Told of each call that was launched, and asked at the watchdog's beat. ``limit``: seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._launched: list[tuple[RingCall, torch.cuda.Event]] = []
        self._lock = Lock()  # calls are launched while the watchdog looks
        self._question: Question | None = None  # that is not answered yet
        self._asked = 0.0  # when
        self._waited, self._looked, self._beat = 0.0, 0.0, time.monotonic()

    def launched(self, call: RingCall, event: torch.cuda.Event) -> None:
        forgotten = []
        with self._lock:
            if len(self._launched) == _REMEMBERED:
                forgotten = self._launched[1::2]
                del self._launched[1::2]
            self._launched.append((call, event))
        del forgotten  # without the lock: the driver may keep this thread

    def beat(self) -> float:
        """Counts the time since the last beat, which it returns, and looks at events where none is known to have ended for long."""
        now = time.monotonic()
        passed, self._beat = min(now - self._beat, _LONGEST_BEAT), now
        if self._launched:
            self._count(passed)
        else:
            self._waited = self._looked = 0.0
        return passed

    def _count(self, passed: float) -> None:
        self._waited += passed
        if self._waited - self._looked > min(self.limit / _LOOKS, LASTING):
            self._poll()

    def stalled(self) -> Unfinished | None:
        """What the device has not finished within the limit."""
        return None if (lasting := self.lasting()) is None or lasting.seconds < self.limit else lasting

    def behind(self) -> bool:
        """Whether it is not known to have ended all of its calls."""
        return bool(self._launched)

    def lasting(self) -> Unfinished | None:
        """What the device has not finished, as of the last look at it; None where it ended a call since, or has none."""
        with self._lock:
            return Unfinished(self._launched[0][0], self._looked) if self._launched and self._looked else None

    def _poll(self) -> None:
        """An answer that is late is taken at a later beat; after :data:`_KEPT` seconds nothing more counts as ended."""
        if self._question is None:
            with self._lock:
                self._question, self._asked = ask([event for _, event in self._launched]), self._beat
        question = self._question
        answered = question.answered.wait(ANSWER_WITHIN)
        self._forget(question.events[: question.ended])
        if answered:
            self._question = None
            let_go(question)
        if answered or self._beat - self._asked > _KEPT:
            self._looked = self._waited

    def _forget(self, ended: Sequence[torch.cuda.Event]) -> None:
        known = {id(event) for event in ended}
        with self._lock:
            gone = [pair for pair in self._launched if id(pair[1]) in known]
            self._launched = [pair for pair in self._launched if id(pair[1]) not in known]
        if gone:
            self._waited = self._looked = 0.0
            let_go(gone)
