"""For how long this process's host has been in a call that it only has to give to its device.

That takes microseconds, or minutes where the call is compiled first, which may take any time. What keeps a host longer is in C++:
the making of NCCL's connections, a driver that waits for a kernel that waits for another rank.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch_bridge.failures.device_progress import RingCall, Unfinished


class HostProgress:
    """Told of its calls at the watchdog's beat, and asked then. ``limit``: seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._compiling: set[object] = set()
        self._seconds: dict[int, float] = {}
        self._calls: dict[int, RingCall] = {}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """In this block, of any thread, no call is too long."""
        self._compiling.add(key := object())
        try:
            yield
        finally:
            self._compiling.discard(key)

    def beat(self, passed: float, calls: Iterable[RingCall]) -> None:
        """``passed``: seconds since the last one. ``calls``: those that the host is in."""
        self._calls = {id(call): call for call in calls}
        before = {} if self._compiling else self._seconds
        self._seconds = {key: before.get(key, -passed) + passed for key in self._calls}

    def stalled(self) -> Unfinished | None:
        """The call that the host has been in beyond the limit."""
        key = max(self._seconds, key=self._seconds.__getitem__, default=None)
        return None if key is None or self._seconds[key] < self.limit else Unfinished(self._calls[key], self._seconds[key])
