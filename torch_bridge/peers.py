"""Who of the world is still alive, and what becomes of a ring call whose peer is not.

Two things end such a call. gloo reports a broken connection to a neighbour, within milliseconds: :class:`watch` raises
:class:`PeerFailure` from it. Whoever waits for others hangs in C++, where no Python exception reaches it (as does every GPU
under NCCL): the watchdog thread, which the coordinator tells of the death, prints the same message and ends the process.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch

from torch_bridge import coordinator
from torch_bridge.mesh import Ring

# How long after the death of a peer the others may live on, in seconds; `runtime.start(peer_timeout=)` changes it.
PEER_TIMEOUT = 20.0
# The exit status of a process that the watchdog ends: os.EX_UNAVAILABLE, "a service is unavailable".
EXIT_PEER_FAILURE = 69

# What JAX's CPU and GPU collectives say when a connection breaks. They come as ValueError or JaxRuntimeError.
_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|connection (reset|closed)|socket closed", re.IGNORECASE)


class PeerFailure(RuntimeError):
    """A process of the ring has died in the middle of a step. The message names the ring (its global ranks) and the step."""


@dataclass
class _Peers:
    """What this process knows of the others, and its own ring calls that have not ended."""

    timeout: float = PEER_TIMEOUT
    collectives_see_the_end: bool = False
    connection: socket.socket | None = None
    gone: dict[int, bool] = field(default_factory=dict)  # in the order of their end; True after a goodbye
    news: threading.Condition = field(default_factory=threading.Condition)
    active: dict[int, "watch"] = field(default_factory=dict)
    launched: dict[tuple[int, ...], tuple["watch", torch.cuda.Event]] = field(default_factory=dict)
    calls: Counter[tuple[tuple[int, ...], str]] = field(default_factory=Counter)


# A process has one life, and its peers see one end of it: this state cannot live anywhere but in the module.
_peers = _Peers()


def join(address: str, endpoint: coordinator.Endpoint, rank: int, peer_timeout: float, patience: float) -> None:
    """Tell the coordinator that this rank lives, and listen for those who do not. The first call counts.

    Raises OSError when the coordinator cannot be reached within ``patience`` seconds.
    """
    if _peers.connection is not None:
        return
    connection = socket.create_connection((address, endpoint.liveness_port), timeout=patience)
    connection.settimeout(None)
    coordinator.keep_alive(connection)
    connection.sendall(json.dumps({"token": endpoint.token, "rank": rank}).encode() + b"\n")
    _peers.connection, _peers.timeout = connection, peer_timeout
    os.register_at_fork(after_in_child=_forget)
    for loop, arguments in ((_listen, (connection,)), (_watchdog, ())):
        threading.Thread(target=loop, args=arguments, name=f"ring-attn{loop.__name__}", daemon=True).start()


def say_goodbye() -> None:
    """Leave in good order, unless an exception ends this process: then it has died, for the others."""
    if _peers.connection is not None and getattr(sys, "last_value", None) is None:
        with suppress(OSError):
            _peers.connection.sendall(b'{"bye": true}\n')


def trust_collectives() -> None:
    """The collectives report by themselves when a process has ended, as gloo does: leave good ends to them."""
    _peers.collectives_see_the_end = True


def _forget() -> None:
    """In a forked child, as torch's DataLoader makes: an open copy of the connection would hide the death of the parent."""
    if _peers.connection is not None:
        os.close(_peers.connection.detach())
    _peers.connection = None


def _listen(connection: socket.socket) -> None:
    """Write down who leaves, until this process does."""
    with suppress(OSError, ValueError), connection.makefile("r") as lines:
        for line in lines:
            notice = json.loads(line)
            with _peers.news:
                _peers.gone[int(notice["gone"])] = bool(notice["clean"])
                _peers.news.notify_all()


def _watchdog() -> None:
    """End this process when a ring call cannot return because a peer has gone."""
    while True:
        with _peers.news:
            _peers.news.wait_for(lambda: _peers.gone)
        for call in _unfinished():
            if call.overdue():
                _end(call)
        time.sleep(0.25)


def _unfinished() -> list["watch"]:
    launched = [call for call, event in list(_peers.launched.values()) if not event.query()]
    return list(_peers.active.values()) + launched


def _end(call: "watch") -> None:
    print(f"{PeerFailure.__module__}.PeerFailure: {call.describe()} This process ends.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_PEER_FAILURE)


class watch:
    """Around a ring call: names the ring and the step when a peer dies in it, instead of hanging.

    ``step``: "forward" or "backward", counted per ring. Inside it: compute, and wait for the results, or set ``event`` to one that
    is complete when the device has them: the call then goes on after the block. A broken collective raises
    :class:`PeerFailure`, and so does a new step of a ring that has lost a member. A call that hangs although a member of its
    ring has died ends the process within the ``peer_timeout`` of ``runtime.start``, with the same message on stderr and exit
    status ``EXIT_PEER_FAILURE``. A ring of one is not watched.
    """

    __slots__ = ("call", "event", "ring", "since", "step")

    def __init__(self, ring: Ring, step: str) -> None:
        self.ring, self.step, self.call, self.since = ring, step, 0, 0.0
        self.event: torch.cuda.Event | None = None

    def __enter__(self) -> "watch":
        if self.ring.size > 1:
            key = (self.ring.ranks, self.step)
            _peers.calls[key] += 1
            self.call = _peers.calls[key]
            if _peers.gone and self._gone():
                raise PeerFailure(self.describe())
            _peers.active[id(self)] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.ring.size == 1:
            return
        if error is None and self.event is not None:
            _peers.launched[self.ring.ranks] = (self, self.event)
        _peers.active.pop(id(self), None)
        if isinstance(error, Exception) and _COLLECTIVE_ERROR.search(str(error)):
            self._await_notice()
            raise PeerFailure(self.describe(str(error))) from error

    def overdue(self) -> bool:
        """True once this call has had its time to end by itself since a member of its ring has gone."""
        grace = self._grace()
        if grace is None:
            return False
        self.since = self.since or time.monotonic()
        return time.monotonic() - self.since > grace

    def _gone(self) -> dict[int, bool]:
        return {rank: clean for rank, clean in list(_peers.gone.items()) if rank in self.ring.ranks}

    def _grace(self) -> float | None:
        """Seconds for this call to end by itself, None where there is no need to end it."""
        gone = self._gone()
        if not all(gone.values()):
            return _peers.timeout / 4  # of a vanished host, the kernel learns only after most of the timeout
        # A peer that ended in good order may have given all it had, and this call be computing on it.
        return 3 * _peers.timeout if gone and not _peers.collectives_see_the_end else None

    def _await_notice(self, seconds: float = 2.0) -> None:
        """The broken collective is often seen before the notice of who has died."""
        with _peers.news:
            _peers.news.wait_for(self._gone, timeout=seconds)

    def describe(self, cause: str = "") -> str:
        """The ring, the step, who has gone, and what to do."""
        gone = [f"{rank} ({'ended' if clean else 'died'})" for rank, clean in self._gone().items()]
        who = f"global rank {', then '.join(gone)}" if gone else "a peer cannot be reached"
        because = f" ({cause.strip().splitlines()[0]})" if cause.strip() else ""
        return (
            f"the {self.ring} lost a member in {self.step} step {self.call}, on global rank {self.ring.ranks[self.ring.rank]}: "
            f"{who}{because}. See the log of that process for the reason, and start all processes of the job again."
        )
