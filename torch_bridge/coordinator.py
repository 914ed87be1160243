"""A small process beside global rank 0: JAX's coordination service, and who of the world is still alive.

It is a process of its own for two reasons. When a process that hosts the service dies, JAX aborts every other process from
C++ at once, before any of them can say which ring and step it was in; and a service inside rank 0 would force rank 0 to
outlive all others. It imports neither torch nor JAX's Python, ends when the last rank has left, and is started as a script.

Liveness needs no heartbeat: every rank holds one TCP connection, and the kernel closes it when the process ends, however it
ends. A host that vanishes is found by TCP keepalive. A busy or stopped process is not taken for a dead one.

The protocol is lines of JSON. To the coordinator: ``{"token", "rank"}`` once, ``{"bye": true}`` before a clean end. From it:
``{"gone": rank, "clean": bool}`` for every rank that has left.
"""

import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

# Keepalive finds a vanished host after IDLE + COUNT * INTERVAL seconds.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3, 3
# JAX's own heartbeat is only the last resort: the connections tell sooner.
SERVICE_HEARTBEAT = 100


class Endpoint(NamedTuple):
    """Where the coordinator listens: the ports of JAX's service and of the liveness connections, and their token."""

    service_port: int
    liveness_port: int
    token: str


def launch(world: int, timeout: float) -> Endpoint:
    """Start a coordinator for ``world`` ranks in a process of its own; it ends by itself. RuntimeError when it cannot start."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-P", __file__, str(world), str(timeout)]
    try:
        done = subprocess.run(
            command, input=token, capture_output=True, text=True, timeout=timeout, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the coordinator process must start within {timeout:g} s, but did not ({command})") from error
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"the coordinator process could not start ({command}):\n{done.stderr.strip()}")
    ports = json.loads(done.stdout.splitlines()[-1])
    return Endpoint(ports["service"], ports["liveness"], token)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out when the other host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": KEEPALIVE_IDLE, "TCP_KEEPINTVL": KEEPALIVE_INTERVAL, "TCP_KEEPCNT": KEEPALIVE_COUNT}
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Peer:
    """One connection: its rank once it has said so, and what has arrived of its next line."""

    connection: socket.socket
    rank: int | None = None
    clean: bool = False
    pending: bytes = b""


@dataclass
class Liveness:
    """Accepts the ranks' connections and tells everyone when one closes."""

    listener: socket.socket
    token: str
    peers: dict[int, _Peer] = field(default_factory=dict)
    gone: list[bytes] = field(default_factory=list)
    seen: int = 0

    def serve(self, world: int, timeout: float) -> None:
        """Run until every rank has left, or none is here ``timeout`` seconds after the start."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            self.listener.setblocking(False)
            selector.register(self.listener, selectors.EVENT_READ, None)
            while len(self.gone) < world and (self._ranks() or time.monotonic() < deadline):
                for key, _ in selector.select(timeout=1.0):
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._read(selector, key.data)

    def _ranks(self) -> list[_Peer]:
        return [peer for peer in self.peers.values() if peer.rank is not None]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            keep_alive(connection)
            connection.settimeout(1.0)  # a peer that does not read must not stop the notices to the others
            peer = _Peer(connection)
            self.peers[connection.fileno()] = peer
            selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(4096)
        except OSError:
            data = b""
        if data:
            *lines, peer.pending = (peer.pending + data).split(b"\n")
            if all(self._understand(peer, line) for line in lines):
                return
        self._close(selector, peer)

    def _understand(self, peer: _Peer, line: bytes) -> bool:
        """Take one line; False when it does not come from a rank of this job."""
        with suppress(ValueError, KeyError, TypeError):
            message = json.loads(line)
            if peer.rank is None:
                if not secrets.compare_digest(str(message["token"]), self.token):
                    return False
                peer.rank = int(message["rank"])
                self._send(peer, b"".join(self.gone))
            peer.clean = peer.clean or "bye" in message
            return True
        return False

    def _close(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        selector.unregister(peer.connection)
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        if peer.rank is None:
            return
        notice = json.dumps({"gone": peer.rank, "clean": peer.clean}).encode() + b"\n"
        self.gone.append(notice)
        for other in self._ranks():
            self._send(other, notice)

    def _send(self, peer: _Peer, notice: bytes) -> None:
        with suppress(OSError):  # a dead peer shows when it is read
            peer.connection.sendall(notice)


def _listener(world: int) -> socket.socket:
    """For IPv6 too, where the host has it: the others resolve the address as they like."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world)
    return socket.create_server(("", 0), backlog=world)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _start_service(world: int, attempts: int = 5) -> tuple[object, int]:
    """JAX's coordination service and its port. The service takes no port 0, so a free one may be lost to a race: try again."""
    from jaxlib import _jax

    while True:
        port = _free_port()
        try:
            # Recoverable: the death of a task neither aborts the others from C++ nor holds up their shutdown.
            service = _jax.get_distributed_runtime_service(
                f"[::]:{port}", world, heartbeat_timeout=SERVICE_HEARTBEAT, shutdown_timeout=1, recoverable=True
            )
        except Exception:
            attempts -= 1
            if not attempts:
                raise
        else:
            return service, port


def _detach() -> None:
    """Go on in a child of a process that has ended, so that rank 0 has no child to wait for and keeps no pipe open."""
    if os.fork():
        os._exit(0)


def _close_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def main() -> None:
    world, timeout, token = int(sys.argv[1]), float(sys.argv[2]), sys.stdin.readline().strip()
    _detach()
    listener = _listener(world)
    _service, port = _start_service(world)  # it lives as long as its object
    print(json.dumps({"service": port, "liveness": listener.getsockname()[1]}), flush=True)
    _close_standard_streams()
    Liveness(listener, token).serve(world, timeout)
    os._exit(0)  # without the service's own farewell: nobody is left to hear it


if __name__ == "__main__":
    main()
