"""Whether a GPU is past what it had been given at some point, for those who must not wait for its driver.

A driver may keep whoever asks about an event, or lets go of one, for as long as another thread waits in it: for a copy to memory
that is not pinned (``x.cpu()``, ``loss.item()``), say, behind a kernel that never ends. So threads of their own ask, and let go.
That torch asks with the GIL held is not mended by that: a driver that kept such a question would keep the process.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread

import torch

ANSWERED = 0.2  # seconds after which the driver counts as kept, until it has answered


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU is past what it has been given so far; None where the host has waited."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def has_ended(event: torch.cuda.Event) -> bool:
    """Whether the event is known to have ended: False where the driver does not say."""
    return _looks.has_ended(event)


def let_go(event: torch.cuda.Event) -> None:
    """Takes the last reference to an event, but for the caller's own, which must end with this call."""
    _ended_events(partial(id, event))


class _OnAThread:
    """Makes calls one after another, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name, self._calls, self._starting = name, SimpleQueue[Callable[[], object]](), Lock()
        self._thread: Thread | None = None

    def __call__(self, call: Callable[[], object]) -> None:
        with self._starting:
            if self._thread is None:
                thread = Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()  # lets go of the one before, and of its event
            call()


class _Looks:
    def __init__(self) -> None:
        self._asked = _OnAThread("ring-attn-events")
        self._late: Future[bool] = Future()  # the last answer that did not come in time
        self._late.set_result(True)

    def has_ended(self, event: torch.cuda.Event) -> bool:
        if not self._late.done():
            return False
        answer: Future[bool] = Future()
        self._asked(lambda: answer.set_result(_ended(event)))
        try:
            return answer.result(ANSWERED)
        except TimeoutError:
            self._late = answer
            return False


def _ended(event: torch.cuda.Event) -> bool:
    try:
        return event.query()
    except Exception:  # after an error of CUDA, which the program meets too: the device does nothing any more
        return True


# Apart: a driver that keeps whoever lets go of an event may still answer.
_looks, _ended_events = _Looks(), _OnAThread("ring-attn-ended-events")
