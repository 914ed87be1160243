"""Ring calls: each is compared, watched, and terminated if the other ranks of its ring do not join it.

A rank may have died, failed in its own call, called something else, or stopped calling. If this is known before a call enters its
collectives, the call raises. Inside the call most ranks hang in C++ (under NCCL, all of them), where no Python exception can reach
them: there the watchdog thread prints the same message and ends the process. Only a neighbour of a dead process gets gloo's
broken-connection error, which :class:`watch` turns into a :class:`PeerFailure`.
"""

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType

import torch

from torch_bridge.failures import peers
from torch_bridge.mesh.rings import ProcessRing

# What JAX's CPU and GPU collectives say when a connection breaks. They raise it as ValueError or JaxRuntimeError.
_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|connection (reset|closed)|socket closed", re.IGNORECASE)
_COMPARISON = "comparison"
_SAME_OPTIONS = "every call of a ring must have the same options, shapes and dtypes on all of its ranks"
_ALL_VALID = "every rank of a ring must make the same valid call"
_SAME_AFTER_FAILURE = "after a call that failed, all ranks of a ring must go on with the same call"
_NEXT_NOTICE = 0.2  # seconds between the notices of processes that die together
_LOOK_AGAIN = 0.001  # seconds between two looks at what the device still has to do


class PeerFailure(RuntimeError):
    """The ring cannot continue: one of its processes has died or stopped, has failed, or has called something else in the middle of
    a step. The message names the ring (its global ranks), the step, and what each rank last called."""


def compiling() -> AbstractContextManager[None]:
    """A block in which this process compiles a program, for which it may take any time."""
    return peers.state.host.compiling()


def tell_failure(ring: ProcessRing, error: Exception) -> None:
    """Makes the ring call that the other ranks are in, or enter next, fail too, with the message of this rank's ``error``.

    Does nothing if the others already know of the error because it came from them or was raised inside :class:`watch`.
    """
    if ring.size == 1 or getattr(error, "_ring_knows", False):
        return
    calls = peers.state.calls[ring.ranks]
    calls.number += 1
    calls.last = f"an invalid one ({_message(error)})"
    _tell(ring, calls.number, error)


def _tell(ring: ProcessRing, number: int, error: Exception) -> None:
    _known(error)
    peers.state.failed[ring.ranks, number] = f"this rank ({_message(error)})"
    peers.send({"failed": {"ring": ring.ranks, "number": number, "error": _message(error)}})


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _known(error: Exception) -> Exception:
    """Mark an error as known to all ranks of its ring."""
    with suppress(AttributeError):  # an exception class with slots
        error._ring_knows = True  # type: ignore[attr-defined]
    return error


@contextmanager
def known_to_all() -> Iterator[None]:
    """Errors raised in this block are raised on all ranks of the ring alike, so nobody has to be told."""
    try:
        yield
    except Exception as error:
        raise _known(error) from None


def compare(ring: ProcessRing, call: str, must: str = _SAME_OPTIONS) -> None:
    """Wait until every rank of the ring has come here, and raise ValueError on all of them, with each one's ``call`` in it, unless
    all calls are equal; ``must`` says what has to hold. ValueError too where a rank has failed instead, PeerFailure where one has
    died or does not come. ``runtime.start`` comes before it."""
    if ring.size > 1:
        _resolve(ring, call, must)
        _compare(ring, call, must)


def _resolve(ring: ProcessRing, call: str, must: str = _SAME_AFTER_FAILURE) -> None:
    """Where a call of the ring has failed: wait, before the next one, until all its ranks go on with that one.

    A rank may be inside the call that another has failed in. It would be paired with the next call of those that go on, and
    compute wrong numbers; here they wait until its watchdog has ended it. What this rank's device still has to do comes first,
    because it may be that very call. The coordinator passes on the notices of a rank before its later comparisons: once one has
    succeeded, all earlier failures are known here.
    """
    number = peers.state.calls[ring.ranks].number
    failed = max((earlier for ranks, earlier in list(peers.state.failed) if ranks == ring.ranks and earlier <= number), default=0)
    if failed:
        while not peers.is_past(ring.ranks):
            time.sleep(_LOOK_AGAIN)
        _compare(ring, f"{call}, after call {failed}, which failed", must)
        peers.forget_failures(ring.ranks, peers.state.calls[ring.ranks].number)


def exchange(ring: ProcessRing, what: str, text: str) -> list[str] | None:
    """Wait until every rank of the ring has come here with its text about ``what``; all texts in ring order, or None if they are
    equal. Raises what :func:`compare` raises where a rank has failed, died or does not come."""
    if ring.size == 1:
        return None
    _resolve(ring, what)
    with watch(ring, _COMPARISON, what) as waiting:
        return _exchanged(ring, text, waiting)


def _compare(ring: ProcessRing, call: str, must: str) -> None:
    with watch(ring, _COMPARISON, call) as waiting:
        calls = _exchanged(ring, call, waiting)
        if calls is not None:
            got = "; ".join(f"ring rank {rank}: {other}" for rank, other in enumerate(calls))
            raise _known(ValueError(f"{must}; got {got}"))


def _exchanged(ring: ProcessRing, text: str, waiting: "watch") -> list[str] | None:
    key = (ring.ranks, waiting.number)
    peers.send({"compare": {"ring": ring.ranks, "number": waiting.number, "call": text}})
    with peers.state.news:
        peers.state.news.wait_for(lambda: key in peers.state.compared or waiting.hopeless())
    if key not in peers.state.compared:
        waiting.check()
    return peers.state.compared.pop(key)


class watch:
    """A context manager around a ring call, which ends the call instead of letting it hang when the other ranks do not join.

    ``step``: "forward" or "backward", counted per ring; ``what``: a description of the call, equal on all ranks if the calls are.
    Inside the block, compute and either wait for the results or set ``event`` to an event that completes when the device has them;
    the call is then watched beyond the block. Raises ValueError if another rank has failed instead of joining this call, and
    :class:`PeerFailure` for a broken collective or a ring that cannot continue. A call that hangs because a member of its ring has
    died, failed, called something else or not called ends the process within ``runtime.start``'s ``peer_timeout`` (a death or a
    failure) or ``wait_timeout`` (otherwise), with the same message on stderr and exit status ``EXIT_PEER_FAILURE``. An error
    inside the block is reported to the others. A ring of one is not watched. ``limited``: the block only gives a device something
    to do, so that ``device_timeout`` holds for it too, but for what it compiles.
    """

    __slots__ = ("begun", "call", "event", "finished", "limited", "number", "ring", "since", "step", "what")

    def __init__(self, ring: ProcessRing, step: str, what: str = "", limited: bool = False) -> None:
        self.ring, self.step, self.what, self.limited = ring, step, what, limited
        self.call = self.number = 0
        self.begun = self.since = 0.0
        self.event: torch.cuda.Event | None = None
        self.finished = False  # whether its event is known to be complete

    def __enter__(self) -> "watch":
        if self.ring.size > 1:
            if self.step != _COMPARISON:
                if peers.state.failed:
                    _resolve(self.ring, f"{self.step} of {self.what}")
                if peers.state.settings.every_call and self.step != "start":
                    compare(self.ring, f"{self.step} of {self.what}")
            calls = peers.state.calls[self.ring.ranks]
            calls.number += 1
            calls.steps[self.step] += 1
            self.number, self.call, self.begun = calls.number, calls.steps[self.step], time.monotonic()
            if peers.state.bad_news():
                self.check()
            calls.recent.append((self.number, self.step, self.what))
            calls.last = self
            peers.state.active[id(self)] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.ring.size == 1:
            return
        event, self.event = self.event, None  # whoever has a call keeps no event
        if error is None and event is not None:
            peers.state.launched[self.ring.ranks] = (self, event)
            calls = peers.state.calls[self.ring.ranks]
            calls.launched_at = time.monotonic()  # before the number, which another thread reads
            calls.launched = self.number
            peers.state.device.launched(self, event)
        peers.state.active.pop(id(self), None)
        peers.state.left = time.monotonic()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        recent = peers.state.calls[self.ring.ranks].recent
        if recent and recent[-1][0] == self.number:
            recent.pop()  # the ring may continue, so this call no longer counts as one that all ranks must have made
        if isinstance(error, PeerFailure) or getattr(error, "_ring_knows", False):
            return
        if _COLLECTIVE_ERROR.search(str(error)):
            self._await_notice()
            raise PeerFailure(self.describe(str(error))) from error
        _tell(self.ring, self.number, error)

    def check(self) -> None:
        """Raises if messages from the other ranks mean that this call cannot complete."""
        if self._gone() or peers.state.cut_off or self.ring.ranks in peers.state.stuck:
            raise PeerFailure(self.describe())
        failure = peers.state.failed.get((self.ring.ranks, self.number))
        if failure is not None:
            raise _known(ValueError(f"this call of the {self.ring} failed on {failure}; here: {self}; {_ALL_VALID}"))

    def hopeless(self) -> bool:
        """Whether :meth:`check` raises."""
        ranks = self.ring.ranks
        return peers.state.cut_off or bool(self._gone()) or ranks in peers.state.stuck or (ranks, self.number) in peers.state.failed

    def overdue(self) -> bool:
        """Whether this call has used up its grace period since it became known that it cannot complete."""
        grace = self._grace()
        if grace is None:
            return False
        self.since = self.since or time.monotonic()
        return time.monotonic() - self.since > grace

    def _failure(self) -> str | None:
        """Which rank's call failed with what, where this call cannot end because of it. A device makes its calls in order, and
        waits in an earlier one that failed elsewhere; a comparison is no work of the device."""
        ranks, exact = self.ring.ranks, peers.state.failed.get((self.ring.ranks, self.number))
        if exact or self.step == _COMPARISON:
            return exact
        failed = list(peers.state.failed.items())
        return next((words for (ring, number), words in failed if ring == ranks and number <= self.number), None)

    def _gone(self) -> dict[int, bool]:
        return {rank: clean for rank, clean in list(peers.state.gone.items()) if rank in self.ring.ranks}

    def _grace(self) -> float | None:
        """Seconds this call has to end by itself; None if there is no need to end it."""
        if self.step == _COMPARISON:
            return None  # it waits in Python, so it raises
        if self.ring.ranks in peers.state.stuck:
            return 0.0
        timeout, gone = peers.state.settings.peer_timeout, self._gone()
        if peers.state.cut_off or not all(gone.values()) or self._failure():
            return timeout / 4  # of a vanished host, the kernel learns only after most of the timeout
        # A peer that ended in good order may have given all it had, and this call be computing on it.
        return 3 * timeout if gone and not peers.state.collectives_see_the_end else None

    def _await_notice(self, seconds: float = 2.0) -> None:
        """A broken collective is often seen before the messages that say who has died, on a whole host one after another."""
        with peers.state.news:
            if peers.state.news.wait_for(self.hopeless, timeout=seconds):
                peers.state.news.wait_for(lambda: set(self._gone()) >= set(self.ring.ranks), timeout=_NEXT_NOTICE)

    def __str__(self) -> str:
        if self.step == _COMPARISON:
            return f"the comparison of {self.what}"
        return f"{self.step} step {self.call}" + (f": {self.what}" if self.what else "")

    def describe(self, cause: str = "") -> str:
        """The ring, the step, who has left or what the others last called, and what to do."""
        step = "the comparison before a call" if self.step == _COMPARISON else f"{self.step} step {self.call}"
        here = f"in {step}, on global rank {self.ring.ranks[self.ring.rank]}"
        failure = self._failure()
        if failure is not None:
            return f"the {self.ring} cannot go on {here}: the call failed on {failure}; here: {self}; {_ALL_VALID}."
        if self.ring.ranks in peers.state.stuck:
            return f"the {self.ring} cannot go on {here}: {peers.state.stuck[self.ring.ranks]}"
        gone = [f"{rank} ({'ended' if clean else 'died'})" for rank, clean in self._gone().items()]
        lost = [f"global rank {', then '.join(gone)}"] if gone else []
        lost += [peers.without_coordinator()] if peers.state.cut_off else []
        who = "; ".join(lost) or "a peer cannot be reached"
        because = f" ({cause.strip().splitlines()[0]})" if cause.strip() else ""
        return (
            f"the {self.ring} lost a member {here}: "
            f"{who}{because}. See the log of that process for the reason, and start all processes of the job again."
        )
