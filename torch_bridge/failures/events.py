"""Whether a GPU is past what it had been given at some point, for those who must not wait for its driver.

CUDA's driver was seen to keep whoever lets go of an event while another thread waits in a copy to memory that is not pinned
(``x.cpu()``, ``loss.item()``) behind a kernel that never ends; whoever asks about one, perhaps. So threads of their own do both.
Not mended by that: torch asks with the GIL held, and Python's garbage collector may let go of anything on any thread.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch

ANSWER_WITHIN = 0.2  # seconds, of a driver that is free
_AT_ONCE = 0.3  # seconds, on a host whose threads wait for one another


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU is past what it has been given so far; None where the host has waited."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def start() -> None:
    """Before a process ends: from then on Python starts no threads."""
    _asking.start()
    _letting_go.start()


class Question:
    """``ended``: how many of the ``events`` are known to have ended, from the first on; all that have, once it is ``answered``."""

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self.events, self.ended, self.answered = events, 0, Event()

    def answer(self) -> None:
        for event in self.events:
            if not _has_ended(event):
                break
            self.ended += 1
        self.answered.set()


def ask(events: Sequence[torch.cuda.Event]) -> Question:
    question = Question(events)
    _asking.put(question.answer)
    return question


def has_ended(event: torch.cuda.Event) -> bool:
    """Whether the event is known to have ended: False where the driver does not say."""
    return _patience.has_ended(event)


def let_go(what: object) -> None:
    """Takes the last references to what has events in it, but for the caller's own, which must end at once."""
    _letting_go.put(partial(_hold, what, time.monotonic() + _AT_ONCE))


def _hold(what: object, until: float) -> None:
    time.sleep(max(until - time.monotonic(), 0.0))


class _Worker:
    """Makes calls one after another, on a thread that Python does not wait for as it ends, which it would for an executor's."""

    def __init__(self, name: str) -> None:
        self._name, self._calls, self._starting = name, SimpleQueue[Callable[[], object]](), Lock()
        self._thread: Thread | None = None

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def put(self, call: Callable[[], object]) -> None:
        self.start()
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # and its events


class _Patience:
    """Nobody waits for a driver that has left somebody without an answer."""

    def __init__(self) -> None:
        self._late: Event | None = None

    def has_ended(self, event: torch.cuda.Event) -> bool:
        if self._late is not None and not self._late.is_set():
            return False
        question = ask([event])
        if not question.answered.wait(ANSWER_WITHIN):
            self._late = question.answered
        return question.ended == 1


def _has_ended(event: torch.cuda.Event) -> bool:
    try:
        return event.query()
    except Exception:  # after an error of CUDA, which the program meets too: the device does nothing any more
        return True


# Two: a driver that keeps one of them may answer the other.
_asking, _letting_go, _patience = _Worker("ring-attn-asks"), _Worker("ring-attn-lets-go"), _Patience()
