"""How far this process's GPU is with the ring calls that it was given, from the events that follow them.

A device makes its calls in order. So it is enough to remember one in a while, and to look, once none has ended for long, whether
the oldest of those has: where not, the device is in it, or in one after the last that is known to have ended.
"""

import time
from collections import deque
from typing import NamedTuple, Protocol

import torch

from torch_bridge.job.mesh import Ring

_REMEMBERED = 64  # calls in a limit's time
_LOOKS = 8  # at events, in a limit's time: CUDA forbids them while another thread captures a graph
_LONGEST_BEAT = 2.0  # seconds: a process that was stopped has not waited


class RingCall(Protocol):
    """``begun``: its start, by the monotonic clock; ``number``: counts the calls of its ring."""

    ring: Ring
    begun: float
    number: int


class Unfinished(NamedTuple):
    """The oldest call that the device is known to be in or before, and the seconds for which it has ended none."""

    call: RingCall
    seconds: float


class DeviceProgress:
    """Told of each call that was launched, and asked at the watchdog's beat. ``limit``: seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._remembered: deque[tuple[RingCall, torch.cuda.Event]] = deque()
        self._last: tuple[RingCall, torch.cuda.Event] | None = None
        self._waited, self._looked, self._beat = 0.0, 0.0, time.monotonic()

    def launched(self, call: RingCall, event: torch.cuda.Event) -> None:
        self._last = call, event
        if not self._remembered or call.begun - self._remembered[-1][0].begun > self.limit / _REMEMBERED:
            self._remembered.append(self._last)

    def beat(self) -> None:
        """Counts the time since the last beat, and looks at events where none is known to have ended for long."""
        now = time.monotonic()
        passed, self._beat = min(now - self._beat, _LONGEST_BEAT), now
        if not self._remembered and self._last is None:
            self._waited = self._looked = 0.0
            return
        self._waited += passed
        if self._waited - self._looked > self.limit / _LOOKS:
            self._look()

    def stalled(self) -> Unfinished | None:
        """What the device has not finished within the limit."""
        if self._looked < self.limit or not self._remembered:
            return None
        return Unfinished(self._remembered[0][0], self._waited)

    def _look(self) -> None:
        self._looked = self._waited
        while self._remembered and _has_ended(self._remembered[0][1]):
            self._remembered.popleft()
            self._waited = self._looked = 0.0
        if self._remembered:
            return
        if self._last is not None and not _has_ended(self._last[1]):
            self._remembered.append(self._last)
        self._last = None


def _has_ended(event: torch.cuda.Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # after an error of CUDA, which the program meets too: the device does nothing any more
        return True
