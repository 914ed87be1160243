"""What this process knows about the other ranks, what it reports about itself, and the watchdog thread that ends it when a ring
call can never return (:mod:`torch_bridge.failures.watchdog` says when that is).

All messages go through the coordinator. In normal operation next to nothing is sent: each ring call only records itself, and the
watchdog asks for the state of the other ranks once a call has lasted for a quarter of the wait limit; and the coordinator has all
tell their calls every half of the peer limit.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torch_bridge.failures import coordinator, events
from torch_bridge.failures.deadlock import ASK_AFTER, Message, Ranks, RankStatus, RingStatus, Stalled, named
from torch_bridge.failures.device_progress import LASTING, DeviceProgress, RingCall
from torch_bridge.failures.host_progress import HostProgress
from torch_bridge.failures.liveness import VANISHED_AFTER, keep_alive, unheard

# How long the others may keep running after a peer's death, in seconds; `runtime.start(peer_timeout=)` changes it.
PEER_TIMEOUT = 20.0
DEVICE_TIMEOUT = 600.0  # as NCCL's own
# The exit status of a process that the watchdog ends: os.EX_UNAVAILABLE, "a service is unavailable".
EXIT_PEER_FAILURE = 69
# Seconds that the coordinator has to answer the goodbye of a process that ends.
GOODBYE_TIME = 3.0
# How many calls of each ring are remembered: more than one rank can run ahead of another, given the depth of a GPU's queue.
_REMEMBERED = 128


class WatchedCall(RingCall, Protocol):
    """A ring call of this process, as the watchdog sees it. ``finished``: whether the device is known to have completed it.
    ``limited``: whether the host only gives it to the device, within the device's limit."""

    finished: bool
    limited: bool

    def overdue(self) -> bool:
        """Whether it has used up its grace period since it became known that it cannot complete."""

    def describe(self) -> str:
        """The message to print when it ends the process."""


@dataclass
class Settings:
    """The settings of ``runtime.start``: seconds to end after a peer's death, seconds to wait for an idle rank, whether to compare
    every call, and seconds in which a device finishes one, and a host gives it one."""

    peer_timeout: float = PEER_TIMEOUT
    wait_timeout: float = PEER_TIMEOUT
    every_call: bool = False
    device_timeout: float = DEVICE_TIMEOUT


@dataclass
class RingCalls:
    """This process's calls of one ring: how many in all and of each kind, the last that the device was given and when, and the most
    recent ones as (number, step, what)."""

    number: int = 0
    launched: int = 0
    launched_at: float = -math.inf
    steps: Counter[str] = field(default_factory=Counter)
    recent: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last: WatchedCall | str = ""


@dataclass
class State:
    """What this process knows about the other ranks, and its own unfinished ring calls."""

    settings: Settings = field(default_factory=Settings)
    collectives_see_the_end: bool = False
    connection: socket.socket | None = None
    hosts: list[str] = field(default_factory=list)  # of all ranks
    cut_off: bool = False  # from the coordinator
    why_cut_off: str = ""  # if it said so
    said_goodbye: bool = False  # it has answered ours
    sending: threading.Lock = field(default_factory=threading.Lock)
    news: threading.Condition = field(default_factory=threading.Condition)
    gone: dict[int, bool] = field(default_factory=dict)  # in the order of their end; True after a goodbye
    # By ring and number: which rank's call raised what. Until all ranks of the ring have met again (watchdog._resolve).
    failed: dict[tuple[Ranks, int], str] = field(default_factory=dict)
    stuck: dict[Ranks, str] = field(default_factory=dict)
    compared: dict[tuple[Ranks, int], list[str] | None] = field(default_factory=dict)
    calls: defaultdict[Ranks, RingCalls] = field(default_factory=lambda: defaultdict(RingCalls))
    active: dict[int, WatchedCall] = field(default_factory=dict)
    launched: dict[Ranks, tuple[WatchedCall, torch.cuda.Event]] = field(default_factory=dict)
    device: DeviceProgress = field(default_factory=lambda: DeviceProgress(DEVICE_TIMEOUT))
    host: HostProgress = field(default_factory=lambda: HostProgress(DEVICE_TIMEOUT))
    preparing: set[object] = field(default_factory=set)
    left: float = 0.0  # when the last ring call of this process returned
    asked: float = 0.0  # when the watchdog last asked for the state of the others
    patience: float = LASTING  # seconds of a call before the next word about it

    def bad_news(self) -> bool:
        """Whether anything is known for which a call of some ring cannot end."""
        return bool(self.cut_off or self.gone or self.failed or self.stuck)


# One state per process, hence module-level.
state = State()


def join(address: str, endpoint: coordinator.Endpoint, rank: int, hosts: list[str], settings: Settings, patience: float) -> None:
    """Connect this rank to the coordinator, and start the listener and the watchdog. Only the first call has an effect.

    Raises OSError if the coordinator cannot be reached within ``patience`` seconds.
    """
    if state.connection is not None:
        return
    connection = socket.create_connection((address, endpoint.port), timeout=patience)
    connection.settimeout(None)
    keep_alive(connection, VANISHED_AFTER * settings.peer_timeout)
    hello = {"token": endpoint.token, "rank": rank, "peer_timeout": settings.peer_timeout}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    state.connection, state.hosts, state.settings, state.left = connection, hosts, settings, time.monotonic()
    state.device.limit = state.host.limit = settings.device_timeout
    events.start()
    os.register_at_fork(after_in_child=_forget)
    for loop, arguments in ((_listen, (connection,)), (_watchdog, ())):
        threading.Thread(target=loop, args=arguments, name=f"ring-attn{loop.__name__}", daemon=True).start()


def local_address() -> str:
    """This host's address on the network through which it reaches the coordinator's."""
    return str(state.connection.getsockname()[0]) if state.connection else ""


def without_coordinator() -> str:
    """Who may be lost with the connection to the coordinator, on whose host some of the ranks are."""
    ended = "the connection to the coordinator process beside global rank 0 has ended"
    if state.why_cut_off:
        return f"{ended} ({state.why_cut_off})"
    beside = [rank for rank, host in enumerate(state.hosts) if host == state.hosts[0]]
    if len(beside) == len(state.hosts):  # one host, which is this one
        return ended
    return f"{ended}: it has died, or its whole host {state.hosts[0]} ({named(beside)}) has died or cannot be reached"


def disconnect() -> None:
    """Report a clean exit, unless an exception is ending this process: the others then treat it as dead. A coordinator that does
    not answer is stopped, or its host has vanished: it counts as lost, and nobody waits for it any more."""
    if state.connection is None:
        return
    send({"bye": getattr(sys, "last_value", None) is None})
    with state.news:
        answered = state.news.wait_for(lambda: state.said_goodbye or state.cut_off, timeout=GOODBYE_TIME)
        state.cut_off = state.cut_off or not answered


def collectives_report_ends() -> None:
    """The collectives themselves report that a process has ended, as gloo's do: leave clean exits to them."""
    state.collectives_see_the_end = True


def _forget() -> None:
    """Runs in a forked child, such as a DataLoader worker: its open copy of the connection would hide the parent's death."""
    if state.connection is not None:
        os.close(state.connection.detach())
    state.connection = None


def send(message: Mapping[str, object]) -> None:
    with suppress(OSError), state.sending:  # the listener notices if the coordinator has ended
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


def _take(message: Message) -> None:
    if "ask" in message:
        send({"ask": message["ask"], "report": _report().to_json()})
        return
    if "look" in message:
        send({"calls": list(_ring_statuses(_unfinished_or_young(time.monotonic())).items())})
        return
    with state.news:
        _note(message)
        state.news.notify_all()


def _note(message: Message) -> None:
    if "gone" in message:
        state.gone[int(message["gone"])] = bool(message["clean"])
    elif "compared" in message:
        compared = message["compared"]
        state.compared[tuple(compared["ring"]), compared["number"]] = compared["calls"]
    elif "failed" in message:
        failed = message["failed"]
        state.failed[tuple(failed["ring"]), failed["number"]] = f"global rank {failed['rank']} ({failed['error']})"
    elif "ends" in message:
        state.why_cut_off = str(message["ends"])
    elif "bye" in message:
        state.said_goodbye = True
    elif "stuck" in message:
        _stick(tuple(message["stuck"]["ring"]), message["stuck"]["words"])


def _stick(ranks: Ranks, words: str) -> None:
    if ranks not in state.stuck and not any(call.ring.ranks == ranks for call in _unfinished()):
        print(f"ring_attn: the ring of global ranks {list(ranks)} cannot go on: {words}", file=sys.stderr, flush=True)
    state.stuck[ranks] = words


def _watchdog() -> None:
    """Ask for the state of the others when a ring call takes long, and end this process when the call cannot return."""
    while True:
        time.sleep(min(max(min(state.settings.wait_timeout, state.settings.device_timeout) / 16, 0.05), 0.5))
        _beat()
        _ask(time.monotonic())
        _give_up_a_vanished_coordinator()
        if state.bad_news():
            for call in _unfinished():
                if call.overdue():
                    _end(call)
        with suppress(Exception):  # of a stderr that is closed
            _say_what_lasts(time.monotonic())


def _beat() -> None:
    passed, calls = state.device.beat(), list(state.active.values())
    state.host.beat(passed, [] if state.device.behind() else [call for call in calls if call.limited])


def _give_up_a_vanished_coordinator() -> None:
    limit = VANISHED_AFTER * state.settings.peer_timeout
    with suppress(OSError):  # it is closed already
        if state.connection is not None and unheard(state.connection) > limit:
            state.connection.shutdown(socket.SHUT_RDWR)  # which ends the listener


def _ask(now: float) -> None:
    pause = ASK_AFTER * state.settings.wait_timeout
    waits = _stalled() or any(now - call.begun > pause for call in _unfinished(now - pause))
    if now - state.asked > pause / 2 and waits:
        state.asked = now
        send({"waits": pause / 4})


def _say_what_lasts(now: float) -> None:
    """A call may take any time on a host, and on a device up to its limit, so that nobody is at fault yet: but none is silent."""
    lasting: list[tuple[float, RingCall, str]]
    lasting = [(now - call.begun, call, f"in {call}") for call in list(state.active.values())]
    if (of_device := state.device.lasting()) is not None:
        lasting.append((of_device.seconds, of_device.call, f"waiting for its device, which has yet to end {of_device.call}"))
    longest = max(lasting, key=lambda each: each[0], default=None)
    if longest is not None and longest[0] > state.patience:
        seconds, call, what = longest
        state.patience = 2 * seconds
        print(
            f"ring_attn: global rank {call.ring.ranks[call.ring.rank]} has been {what}, for {seconds:.0f} s{_line_of_main()}; "
            f"py-spy dump --pid {os.getpid()} shows all of its threads",
            file=sys.stderr,
            flush=True,
        )


def _unfinished(young: float = math.inf) -> list[WatchedCall]:
    """The calls that have not ended. A call launched after ``young`` counts as unfinished without querying its event, because CUDA
    forbids the query while a stream is being captured into a graph."""
    pairs = list(state.launched.values())
    launched = [call for call, event in pairs if call.begun > young or _runs(call, event)]
    if pairs:
        events.let_go(pairs)
    return list(state.active.values()) + launched


def _runs(call: WatchedCall, event: torch.cuda.Event) -> bool:
    call.finished = call.finished or events.has_ended(event)
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


def _end(call: WatchedCall) -> None:
    print(f"ring_attn.PeerFailure: {call.describe()} This process ends.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_PEER_FAILURE)


def _report() -> RankStatus:
    """What this process is doing, for the ranks that wait for it."""
    now = time.monotonic()
    unfinished = _unfinished_or_young(now)
    busy = unfinished or state.preparing or _compiles()
    idle = 0.0 if busy else now - state.left
    return RankStatus(state.settings.wait_timeout, idle, _place(idle, unfinished), _ring_statuses(unfinished), _stalled())


def _stalled() -> Stalled | None:
    """What this process's device, or host, has not finished within the limit."""
    of_device = state.device.stalled()
    lasting = of_device or state.host.stalled()
    if lasting is None:
        return None
    call = lasting.call
    return Stalled(call.ring.ranks, call.number, str(call), lasting.seconds, state.device.limit, in_host=of_device is None)


def _unfinished_or_young(now: float) -> list[WatchedCall]:
    return _unfinished(now - ASK_AFTER * state.settings.wait_timeout)


def _ring_statuses(unfinished: list[WatchedCall]) -> dict[Ranks, RingStatus]:
    """Of this process's rings. Looks at no thread's stack: that is not safe while the thread runs."""
    now = time.monotonic()
    begun: dict[Ranks, float] = {}
    for call in unfinished:
        begun[call.ring.ranks] = max(call.begun, begun.get(call.ring.ranks, 0.0))
    rings = {}
    for ranks, calls in list(state.calls.items()):
        digests = {number: _digest(step, what) for number, step, what in calls.recent.copy()}
        waits = now - begun[ranks] if ranks in begun else None
        rings[ranks] = RingStatus(calls.number, waits, digests, str(calls.last), calls.launched, now - calls.launched_at)
    return rings


def _compiles() -> bool:
    """Whether a thread of this process is in torch.compile, which may take minutes and traces past :func:`mark_busy`."""
    files = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")
    return any(
        code.f_code.co_filename.endswith(files)
        for frame in sys._current_frames().values()
        for code, _ in traceback.walk_stack(frame)
    )


def _digest(step: str, what: str) -> str:
    return hashlib.blake2b(f"{step} {what}".encode(), digest_size=8).hexdigest()


def _place(idle: float, unfinished: list[WatchedCall]) -> str:
    """Where the main thread is: its innermost line outside installed packages."""
    if unfinished:
        return f"it is in a call of the {unfinished[0].ring}"
    where = _line_of_main()
    return f"it has been in no ring call for {idle:.0f} s{where}" if idle else f"it prepares a call{where}"


def _line_of_main() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = [line for line in traceback.extract_stack(frame) if not line.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    return f", now at {lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if frame and lines else ""


def mark_busy() -> object:
    """Mark this process as preparing a ring call (tracing, compiling). It does not count as idle until :func:`mark_idle` is called
    with the returned key."""
    key = object()
    state.preparing.add(key)
    return key


def mark_idle(key: object) -> None:
    state.preparing.discard(key)
    state.left = time.monotonic()
