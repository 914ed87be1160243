"""What this process knows of the others of the world, what it tells them of itself, and the thread that ends it when a ring call
can never return (:mod:`torch_bridge.calls` says which).

All news come through the coordinator. While all is well nothing is sent: a ring call writes down what it is, and one that has
lasted for a quarter of the wait limit makes the watchdog ask where the others are.
"""

import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_bridge import coordinator
from torch_bridge.mesh import Ring
from torch_bridge.stuck import ASK_AFTER, Ranks, Report, Standing

# How long after the death of a peer the others may live on, in seconds; `runtime.start(peer_timeout=)` changes it.
PEER_TIMEOUT = 20.0
# The exit status of a process that the watchdog ends: os.EX_UNAVAILABLE, "a service is unavailable".
EXIT_PEER_FAILURE = 69
# How many calls of a ring are remembered: more than a GPU's queue lets one rank run ahead of another.
_REMEMBERED = 128


class Call(Protocol):
    """A ring call of this process, as the watchdog sees it. ``begun``: when, by the monotonic clock; ``finished``: the device is
    known to be past it."""

    ring: Ring
    begun: float
    finished: bool

    def overdue(self) -> bool:
        """Whether it has had its time to end by itself since the news that it cannot go on."""

    def describe(self) -> str:
        """What to say when it ends the process."""


@dataclass
class Settings:
    """What ``runtime.start`` sets: seconds after a death, seconds to wait for an idle rank, and whether to compare every call."""

    peer_timeout: float = PEER_TIMEOUT
    wait_timeout: float = PEER_TIMEOUT
    every_call: bool = False


@dataclass
class RingCalls:
    """This process's calls of one ring: their number, those of each kind, and what the last ones were: (number, step, what)."""

    number: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    recent: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last: Call | str = ""


@dataclass
class State:
    """What this process knows of the others, and its own ring calls that have not ended."""

    settings: Settings = field(default_factory=Settings)
    collectives_see_the_end: bool = False
    connection: socket.socket | None = None
    cut_off: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)
    news: threading.Condition = field(default_factory=threading.Condition)
    gone: dict[int, bool] = field(default_factory=dict)  # in the order of their end; True after a goodbye
    # By ring and number: which rank's call raised what. Until all ranks of the ring have met again (calls._resolve).
    failed: dict[tuple[Ranks, int], str] = field(default_factory=dict)
    stuck: dict[Ranks, str] = field(default_factory=dict)
    compared: dict[tuple[Ranks, int], list[str] | None] = field(default_factory=dict)
    calls: defaultdict[Ranks, RingCalls] = field(default_factory=lambda: defaultdict(RingCalls))
    active: dict[int, Call] = field(default_factory=dict)
    launched: dict[Ranks, tuple[Call, torch.cuda.Event]] = field(default_factory=dict)
    preparing: set[object] = field(default_factory=set)
    left: float = 0.0  # when the last ring call of this process returned
    asked: float = 0.0  # when the watchdog last asked where the others are


# A process has one life, and its peers see one end of it: this state cannot live anywhere but in the module.
state = State()


def join(address: str, endpoint: coordinator.Endpoint, rank: int, settings: Settings, patience: float) -> None:
    """Tell the coordinator that this rank lives, and listen for those who do not. The first call counts.

    Raises OSError when the coordinator cannot be reached within ``patience`` seconds.
    """
    if state.connection is not None:
        return
    connection = socket.create_connection((address, endpoint.port), timeout=patience)
    connection.settimeout(None)
    coordinator.keep_alive(connection)
    connection.sendall(json.dumps({"token": endpoint.token, "rank": rank}).encode() + b"\n")
    state.connection, state.settings, state.left = connection, settings, time.monotonic()
    os.register_at_fork(after_in_child=_forget)
    for loop, arguments in ((_listen, (connection,)), (_watchdog, ())):
        threading.Thread(target=loop, args=arguments, name=f"ring-attn{loop.__name__}", daemon=True).start()


def say_goodbye() -> None:
    """Leave in good order, unless an exception ends this process: then it has died, for the others."""
    if getattr(sys, "last_value", None) is None:
        send({"bye": True})


def trust_collectives() -> None:
    """The collectives report by themselves when a process has ended, as gloo does: leave good ends to them."""
    state.collectives_see_the_end = True


def _forget() -> None:
    """In a forked child, as torch's DataLoader makes: an open copy of the connection would hide the death of the parent."""
    if state.connection is not None:
        os.close(state.connection.detach())
    state.connection = None


def send(message: dict[str, Any]) -> None:
    with suppress(OSError), state.sending:  # the listener learns that the coordinator has gone
        if state.connection is not None:
            state.connection.sendall(json.dumps(message).encode() + b"\n")


def _listen(connection: socket.socket) -> None:
    """Write down what the coordinator says, until this process ends."""
    try:
        with suppress(OSError, ValueError), connection.makefile("r") as lines:
            for line in lines:
                _take(json.loads(line))
    finally:  # whatever ends it: nobody may wait for news that will not come
        with state.news:
            state.cut_off = True
            state.news.notify_all()


def _take(message: dict[str, Any]) -> None:
    if "ask" in message:
        send({"ask": message["ask"], "report": _report().to_json()})
        return
    with state.news:
        _note(message)
        state.news.notify_all()


def _note(message: dict[str, Any]) -> None:
    if "gone" in message:
        state.gone[int(message["gone"])] = bool(message["clean"])
    elif "compared" in message:
        compared = message["compared"]
        state.compared[tuple(compared["ring"]), compared["number"]] = compared["calls"]
    elif "failed" in message:
        failed = message["failed"]
        state.failed[tuple(failed["ring"]), failed["number"]] = f"global rank {failed['rank']} ({failed['error']})"
    elif "stuck" in message:
        _stick(tuple(message["stuck"]["ring"]), message["stuck"]["words"])


def _stick(ranks: Ranks, words: str) -> None:
    if ranks not in state.stuck and not any(call.ring.ranks == ranks for call in _unfinished()):
        print(f"ring_attn: the ring of global ranks {list(ranks)} cannot go on: {words}", file=sys.stderr, flush=True)
    state.stuck[ranks] = words


def _watchdog() -> None:
    """Ask about the others when a ring call lasts long, and end this process when the call cannot return."""
    while True:
        time.sleep(min(max(state.settings.wait_timeout / 16, 0.05), 0.5))
        _ask(time.monotonic())
        if state.gone or state.failed or state.stuck:
            for call in _unfinished():
                if call.overdue():
                    _end(call)


def _ask(now: float) -> None:
    pause = ASK_AFTER * state.settings.wait_timeout
    if now - state.asked > pause / 2 and any(now - call.begun > pause for call in _unfinished(now - pause)):
        state.asked = now
        send({"waits": pause / 4})


def _unfinished(young: float = math.inf) -> list[Call]:
    """The calls that have not ended. One that was launched after ``young`` counts without a look at its event: CUDA forbids that
    while some stream's work is recorded as a graph."""
    launched = [call for call, event in list(state.launched.values()) if call.begun > young or _runs(call, event)]
    return list(state.active.values()) + launched


def _runs(call: Call, event: torch.cuda.Event) -> bool:
    try:
        call.finished = call.finished or event.query()
    except RuntimeError:  # after an error of CUDA, which the program meets too: the device does nothing any more
        call.finished = True
    return not call.finished


def is_past(ranks: Ranks) -> bool:
    """Whether the device is past this process's calls of a ring."""
    launched = state.launched.get(ranks)
    return launched is None or not _runs(*launched)


def forget_failures(ranks: Ranks, number: int) -> None:
    """Those of a ring's calls before this number: all its ranks have gone on."""
    for ring, failed in list(state.failed):
        if ring == ranks and failed < number:
            del state.failed[ring, failed]


def _end(call: Call) -> None:
    print(f"ring_attn.PeerFailure: {call.describe()} This process ends.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_PEER_FAILURE)


def _report() -> Report:
    """What this process does, for the others that wait for it."""
    now = time.monotonic()
    unfinished = _unfinished(now - ASK_AFTER * state.settings.wait_timeout)
    busy = unfinished or state.preparing
    idle = 0.0 if busy else now - state.left
    begun: dict[Ranks, float] = {}
    for call in unfinished:
        begun[call.ring.ranks] = max(call.begun, begun.get(call.ring.ranks, 0.0))
    rings = {}
    for ranks, calls in list(state.calls.items()):
        digests = {number: _digest(step, what) for number, step, what in calls.recent.copy()}
        waits = now - begun[ranks] if ranks in begun else None
        rings[ranks] = Standing(calls.number, waits, digests, str(calls.last))
    return Report(state.settings.wait_timeout, idle, _place(idle, unfinished), rings)


def _digest(step: str, what: str) -> str:
    return hashlib.blake2b(f"{step} {what}".encode(), digest_size=8).hexdigest()


def _place(idle: float, unfinished: list[Call]) -> str:
    """Where the main thread is: the innermost line that is not of an installed package."""
    if unfinished:
        return f"it is in a call of the {unfinished[0].ring}"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = [line for line in traceback.extract_stack(frame) if not line.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    where = f", now at {lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if frame and lines else ""
    return f"it has been in no ring call for {idle:.0f} s{where}" if idle else f"it prepares a call{where}"


def prepare() -> object:
    """This process prepares a ring call (traces, compiles): until :func:`prepared` is given the result it is not idle."""
    key = object()
    state.preparing.add(key)
    return key


def prepared(key: object) -> None:
    state.preparing.discard(key)
    state.left = time.monotonic()
