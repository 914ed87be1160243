"""A small process beside global rank 0: it hosts JAX's coordination service and relays messages between ranks outside collectives.

It is a separate process for two reasons. When a process that hosts the service dies, JAX immediately aborts every other process
from C++, before any of them can say which ring and step it was in; and a service inside rank 0 would force rank 0 to outlive all
others. It imports neither torch nor JAX's Python code, and ends when the last rank has left.

Liveness needs no heartbeat: every rank holds one TCP connection, and the kernel closes it when the process ends, however it
ends. A host that vanishes acknowledges nothing any more. A busy or stopped process is not mistaken for a dead one.

The protocol is lines of JSON. A ring is the list of its global ranks; ``number`` counts each rank's calls of that ring.

====================================================  ======================================================================
To the coordinator                                    What it does
====================================================  ======================================================================
``{"token", "rank", "peer_timeout"}``                 first line: sends this rank the ranks that have left so far
``{"compare": {"ring", "number", "call"}}``           once all members have sent theirs, sends ``{"compared": {"ring", "number",
                                                      "calls"}}`` to each: None if all are equal, else all of them
``{"failed": {"ring", "number", "error"}}``           passes it on to the other members, with the ``"rank"``
``{"waits": seconds}``                                sends ``{"ask": n}`` to all ranks, at most once in so many seconds
``{"ask": n, "report": RankStatus}``                  when all have reported: ``{"stuck": {"ring", "words"}}`` to the members of
                                                      every ring that can never continue (:mod:`torch_bridge.failures.deadlock`)
``{"calls": rings of a RankStatus}``                  the answer to ``{"look": true}``, which all get now and then; when all have
                                                      answered: ``{"stuck": ...}`` to the members of every ring whose calls have
                                                      crossed (:mod:`torch_bridge.failures.deadlock`)
``{"bye": clean}``                                    says whether the end of the connection will be clean; answered alike
====================================================  ======================================================================

When a connection ends, all others get ``{"gone": rank, "clean": bool}``. A rank whose connection the coordinator ends, because it
cannot take what was sent or because it dies itself, gets ``{"ends": why}`` first. Whoever does not send a rank's first line within
``HELLO_TIME`` is disconnected without a word. Lines are bounded before they are parsed.
"""

import json
import math
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jax_core.internals import serve_job
from torch_bridge.failures.addresses import listen, with_port
from torch_bridge.failures.deadlock import (
    ALL_CALL,
    ALL_LAUNCHED,
    Message,
    Ranks,
    RankStatus,
    asked_for,
    crossed_rings,
    deadlocked_rings,
    stalled_rings,
)
from torch_bridge.failures.liveness import VANISHED_AFTER, keep_alive, unheard

# JAX's own heartbeat is only a last resort: the connections report a death sooner.
SERVICE_HEARTBEAT = 100
# How long the answers to one question may take, in seconds; a rank that is silent for longer is treated as idle.
ANSWER_TIME = 1.0
# Seconds within which a connection names its rank, and the length of that line in bytes. Others do not belong to the job.
HELLO_TIME, LONGEST_HELLO = 10.0, 4096
# The length of a rank's later lines. The longest is a report, with about 4 kB for each of its rings.
LONGEST_LINE = 1 << 24

# The packages' folder goes last on sys.path: nothing in it may shadow a standard-library module.
_MAIN = "import sys; sys.path.append({folder!r}); from torch_bridge.failures.coordinator import main; main()"


class Endpoint(NamedTuple):
    """Where the coordinator listens: the ports of JAX's service and of the ranks' connections, and their token."""

    service_port: int
    port: int
    token: str


def launch(world: int, timeout: float, address: str) -> Endpoint:
    """Start a coordinator for ``world`` ranks in its own process. It listens at ``address``
    (:mod:`torch_bridge.failures.addresses`) and ends by itself. Raises RuntimeError if it cannot start."""
    token = secrets.token_hex(16)
    program = _MAIN.format(folder=str(Path(__file__).parents[2]))
    command = [sys.executable, "-P", "-c", program, str(world), str(timeout), address]
    try:
        done = subprocess.run(
            command, input=token, capture_output=True, text=True, timeout=timeout, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the coordinator process must start within {timeout:g} s, but did not ({command})") from error
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"the coordinator process could not start ({command}):\n{done.stderr.strip()}")
    ports = json.loads(done.stdout.splitlines()[-1])
    return Endpoint(ports["service"], ports["ranks"], token)


@dataclass
class _Peer:
    """One connection: its rank once known, what has arrived of its next line, and its last report."""

    connection: socket.socket
    rank: int = -1
    trusted: bool = False  # it knows the token
    accepted: float = field(default_factory=time.monotonic)
    limit: float = 0.0  # seconds without a sign of its host
    clean: bool = False
    pending: bytes = b""
    report: RankStatus | None = None
    silent_since: float = 0.0  # when the first unanswered question was sent; 0: it has answered


@dataclass
class _Question:
    """One round of asking all ranks for their state."""

    number: int = 0
    asked: float = 0.0
    waiting_for: set[int] = field(default_factory=set)
    open: bool = False


@dataclass
class Exchange:
    """Accepts the ranks' connections and handles their messages as described in the module's docstring."""

    listener: socket.socket
    token: str
    world: int
    connections: dict[int, _Peer] = field(default_factory=dict)  # by file descriptor
    gone: list[bytes] = field(default_factory=list)
    known: set[int] = field(default_factory=set)  # all ranks that have ever connected
    comparisons: dict[tuple[Ranks, int], dict[int, str]] = field(default_factory=dict)
    question: _Question = field(default_factory=_Question)
    looked: float = field(default_factory=time.monotonic)  # when all ranks were last asked for their calls
    looks_at: dict[int, RankStatus | None] = field(default_factory=dict)  # by rank, None until it has told them

    def serve(self, timeout: float) -> None:
        """Run until every rank has left, or until ``timeout`` seconds after the start if no rank is connected then. The ranks are
        told what else ends it."""
        try:
            self._serve(time.monotonic() + timeout)
        except BaseException as error:
            self._tell(list(self._peers()), {"ends": _message(error)})
            raise

    def _serve(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            self.listener.setblocking(False)
            selector.register(self.listener, selectors.EVENT_READ, None)
            while len(self.gone) < self.world and (self._peers() or time.monotonic() < deadline):
                for key, _ in selector.select(timeout=0.1 if self.question.open else 0.5):
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._read(selector, key.data)
                for peer in [peer for peer in self.connections.values() if self._is_lost(peer)]:
                    self._close(selector, peer)
                if self.question.open and time.monotonic() - self.question.asked > ANSWER_TIME:
                    self._judge()
                self._look_now_and_then()

    def _is_lost(self, peer: _Peer) -> bool:
        """Its host has vanished, or it never said who it is."""
        if peer.rank < 0:
            return time.monotonic() - peer.accepted > HELLO_TIME
        return unheard(peer.connection) > peer.limit

    def _peers(self) -> dict[int, _Peer]:
        return {peer.rank: peer for peer in self.connections.values() if peer.rank >= 0}

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            connection.settimeout(1.0)  # a peer that does not read must not hold up the messages to the others
            peer = _Peer(connection)
            self.connections[connection.fileno()] = peer
            selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
            self._handle(peer, data)
        except OSError:
            data = b""
        except Exception as error:  # whatever a connection brings, it ends no other
            data = b""
            if peer.trusted:
                self._send(peer, _line({"ends": f"the coordinator could not take what it sent: {_message(error)}"}))
        if not data:
            self._close(selector, peer)

    def _handle(self, peer: _Peer, data: bytes) -> None:
        """Handle all lines that are complete with ``data``. Raises if they do not come from a rank of this job."""
        *lines, peer.pending = (peer.pending + data).split(b"\n")
        for line in lines:
            message = json.loads(_bounded(peer, line))
            if peer.rank < 0:
                self._welcome(peer, **message)
            else:
                self._take(peer, message)
        _bounded(peer, peer.pending)

    def _welcome(self, peer: _Peer, token: str, rank: int, peer_timeout: float) -> None:
        peer.trusted = secrets.compare_digest(token.encode(), self.token.encode())
        if not peer.trusted:
            raise ValueError("this is another job's token")
        if type(rank) is not int or not 0 <= rank < self.world:
            raise ValueError(f"there is no global rank {rank!r} in a world of {self.world}")
        if rank in self.known:
            raise ValueError(f"global rank {rank} has a connection already, or had one")
        keep_alive(peer.connection, limit := VANISHED_AFTER * float(peer_timeout))
        peer.rank, peer.limit = rank, limit
        self.known.add(rank)
        self._send(peer, b"".join(self.gone))

    def _take(self, peer: _Peer, message: Message) -> None:
        if "compare" in message:
            self._compare(peer, **message["compare"])
        elif "failed" in message:
            self._pass_on(peer, **message["failed"])
        elif "waits" in message:
            self._ask(float(message["waits"]))
        elif "report" in message:
            self._take_report(peer, message["ask"], RankStatus.from_json(message["report"]))
        elif "calls" in message:
            self._take_calls(peer, RankStatus.of_calls(message["calls"]))
        elif "bye" in message:
            peer.clean = bool(message["bye"])
            self._send(peer, _line(message))

    def _compare(self, peer: _Peer, ring: list[int], number: int, call: str) -> None:
        key = (tuple(ring), number)
        calls = self.comparisons.setdefault(key, {})
        calls[peer.rank] = call
        if len(calls) == len(ring):
            del self.comparisons[key]
            different = [calls[rank] for rank in ring] if len(set(calls.values())) > 1 else None
            self._tell(ring, {"compared": {"ring": ring, "number": number, "calls": different}})

    def _pass_on(self, peer: _Peer, ring: list[int], number: int, error: str) -> None:
        self.comparisons.pop((tuple(ring), number), None)  # it will never be complete
        others = [rank for rank in ring if rank != peer.rank]
        self._tell(others, {"failed": {"ring": ring, "number": number, "rank": peer.rank, "error": error}})

    def _ask(self, pause: float) -> None:
        now = time.monotonic()
        if self.question.open or now - self.question.asked < pause:
            return
        peers = self._peers()
        self.question = _Question(self.question.number + 1, now, set(peers), open=True)
        for peer in peers.values():
            peer.silent_since = peer.silent_since or now
        self._tell(list(peers), {"ask": self.question.number})

    def _take_report(self, peer: _Peer, question: int, report: RankStatus) -> None:
        peer.report, peer.silent_since = report, 0.0
        if question == self.question.number:
            self.question.waiting_for.discard(peer.rank)
            if self.question.open and not self.question.waiting_for:
                self._judge()

    def _look_now_and_then(self) -> None:
        """Whether calls that have ended were paired with others: nobody waits for those."""
        peers, now = self._peers(), time.monotonic()
        if now - self.looked > min((peer.limit for peer in peers.values()), default=math.inf):
            self.looked, self.looks_at = now, dict.fromkeys(peers)
            self._tell(list(peers), {"look": True})

    def _take_calls(self, peer: _Peer, calls: RankStatus) -> None:
        """A rank that does not answer leaves the others unlooked at until the next time."""
        self.looks_at[peer.rank] = calls
        reports = {rank: report for rank, report in self.looks_at.items() if report is not None}
        if len(reports) == len(self.looks_at):
            self.looks_at = {}
            self._tell_stuck(crossed_rings(reports), reports)

    def _judge(self) -> None:
        """Close the question, and notify the members of every ring that can never continue."""
        self.question.open = False
        peers = self._peers()
        limit = min((peer.report.limit for peer in peers.values() if peer.report), default=0.0)
        reports = {rank: _report(peer, limit) for rank, peer in peers.items()}
        answered = {rank: report for rank, report in reports.items() if not peers[rank].silent_since}
        self._tell_stuck(stalled_rings(answered), reports, ALL_LAUNCHED)
        self._tell_stuck(deadlocked_rings(reports), reports)

    def _tell_stuck(self, rings: dict[Ranks, str], reports: dict[int, RankStatus], advice: str = ALL_CALL) -> None:
        for ring, why in rings.items():
            words = f"{why}. Last asked for: {asked_for(ring, reports)}. {advice}"
            self._tell(ring, {"stuck": {"ring": list(ring), "words": words}})

    def _close(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        selector.unregister(peer.connection)
        del self.connections[peer.connection.fileno()]
        peer.connection.close()
        if peer.rank < 0:
            return
        notice = _line({"gone": peer.rank, "clean": peer.clean})
        self.gone.append(notice)
        self.question.waiting_for.discard(peer.rank)
        for other in self._peers().values():
            self._send(other, notice)

    def _tell(self, ranks: Iterable[int], message: Mapping[str, object]) -> None:
        peers, line = self._peers(), _line(message)
        for rank in ranks:
            if rank in peers:
                self._send(peers[rank], line)

    def _send(self, peer: _Peer, line: bytes) -> None:
        with suppress(OSError):  # a dead peer is noticed when its connection is read
            peer.connection.sendall(line)


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _bounded(peer: _Peer, line: bytes) -> bytes:
    """The line, or its beginning, unless it is too long to be looked at: then ValueError."""
    limit = LONGEST_HELLO if peer.rank < 0 else LONGEST_LINE
    if len(line) > limit:
        raise ValueError(f"a line of more than {limit} bytes")
    return line


def _message(error: BaseException) -> str:
    """The error and the line of this package where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == Path(__file__).parent]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:2000] + where


def _report(peer: _Peer, limit: float) -> RankStatus:
    """A rank's last report; if it has not answered since, what is known about it."""
    report = peer.report or RankStatus(limit, 0.0, "", {}, reported=False)
    if not peer.silent_since:
        return report
    silent = time.monotonic() - peer.silent_since
    busy = peer.report is not None and not report.idle  # as of its last report; a long call may keep its process from answering
    return report._replace(
        idle=0.0 if busy else report.idle + silent, place=f"has not answered for {silent:.0f} s: is its process stopped?"
    )


def _free_port(address: str) -> int:
    with listen(address) as probe:
        return int(probe.getsockname()[1])


def _start_service(world: int, address: str, attempts: int = 5) -> tuple[object, int]:
    """JAX's coordination service and its port. The service does not accept port 0, so a free port may be lost to a race: retry."""
    while True:
        port = _free_port(address)
        try:
            service = serve_job(with_port(address, port), world, SERVICE_HEARTBEAT)
        except Exception:
            attempts -= 1
            if not attempts:
                raise
        else:
            return service, port


def _detach() -> None:
    """Continue in a forked child while the parent exits, so that rank 0 has no child to wait for and keeps no pipe open."""
    if os.fork():
        os._exit(0)


def _close_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def main() -> None:
    world, timeout, address, token = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.stdin.readline().strip()
    _detach()
    listener = listen(address, world)
    _service, port = _start_service(world, address)  # the service lives as long as this object
    print(json.dumps({"service": port, "ranks": listener.getsockname()[1]}), flush=True)
    _close_standard_streams()
    try:
        Exchange(listener, token, world).serve(timeout)
    finally:
        os._exit(0)  # skips the service's own shutdown: no rank is left to notify
