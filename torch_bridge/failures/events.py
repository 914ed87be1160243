"""Whether a GPU is past what it had been given at some point, for those who must not wait for its driver.

A driver may keep whoever asks about an event, or lets go of one, for as long as another thread is in it: in a copy to the host, or
in a compiler that waits for a kernel, which waits for another rank. So one thread asks, and lets go, for all.
"""

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread

import torch

ANSWERED = 1.0  # seconds in which a driver that nobody keeps has answered


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU is past what it has been given so far; None where the host has waited."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def has_ended(event: torch.cuda.Event) -> bool:
    """Whether the event is known to have ended: False where the driver does not say."""
    return _looks.has_ended(event)


class _Looks:
    def __init__(self) -> None:
        self._turn = Lock()  # of whoever asks, until the thread has answered
        self._asked: SimpleQueue[tuple[torch.cuda.Event, Future[bool]]] = SimpleQueue()
        self._thread: Thread | None = None

    def has_ended(self, event: torch.cuda.Event) -> bool:
        if not self._turn.acquire(timeout=ANSWERED):
            return False
        if self._thread is None:
            self._thread = Thread(target=self._answer, name="ring-attn-events", daemon=True)
            self._thread.start()
        answer: Future[bool] = Future()
        self._asked.put((event, answer))
        try:
            return answer.result(ANSWERED)
        except TimeoutError:
            return False

    def _answer(self) -> None:
        while True:
            event, answer = self._asked.get()  # lets go of the one before, which nobody else may have any more
            answer.set_result(_ended(event))
            self._turn.release()


_looks = _Looks()


def _ended(event: torch.cuda.Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # after an error of CUDA, which the program meets too: the device does nothing any more
        return True
