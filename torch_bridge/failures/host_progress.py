"""For how long this process's host has been in a call that it only has to give to its device.

That takes microseconds; or minutes where the call is compiled first, which may take any time, or where the device is behind, which
:mod:`torch_bridge.failures.device_progress` watches. What keeps a host beyond is in C++: the making of NCCL's connections, a driver
that waits for a kernel that waits for another rank. A compiler that does not return is not told from one that takes long.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch_bridge.failures.device_progress import RingCall, Unfinished


class HostProgress:
    """Told of its calls at the watchdog's beat, and asked then, by any thread. ``limit``: seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._compiling: set[object] = set()
        # By the calls' ids, which are theirs for as long as they are in here. Never changed: other threads read it.
        self._in: dict[int, Unfinished] = {}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """In this block, of any thread, no call is too long."""
        self._compiling.add(key := object())
        try:
            yield
        finally:
            self._compiling.discard(key)

    def beat(self, passed: float, calls: Iterable[RingCall]) -> None:
        """``passed``: seconds since the last one. ``calls``: those that the host is in while its device waits for it."""
        before = {} if self._compiling else self._in
        self._in = {id(x): Unfinished(x, before[id(x)].seconds + passed if id(x) in before else 0.0) for x in calls}

    def stalled(self) -> Unfinished | None:
        """The call that the host has been in beyond the limit."""
        longest = max(self._in.values(), key=lambda each: each.seconds, default=None)
        return None if longest is None or longest.seconds < self.limit else longest
