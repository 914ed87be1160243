"""Whether the host at the other end of a connection is still there. Imports nothing of torch or JAX."""

import math
import socket
import sys

# The share of `peer_timeout` after which a host that does not answer has vanished. The rest is for the call to end by itself.
VANISHED_AFTER = 0.5
# Where `struct tcp_info` of Linux has `tcpi_last_ack_recv`, in milliseconds: after 8 bytes and 12 words.
_LAST_ACK = slice(56, 60)


def keep_alive(connection: socket.socket, limit: float) -> None:
    """Let the kernel probe the other host while nothing is under way, and close the connection after ``limit`` seconds without an
    answer, rounded up."""
    probe = max(int(limit / 4), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": max(math.ceil(limit / probe) - 1, 1)}
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unheard(connection: socket.socket) -> float:
    """Seconds since the other host's kernel last acknowledged anything; 0 where the system does not tell.

    While data waits for its acknowledgement the kernel does not probe, and it would repeat the data for a quarter of an hour.
    """
    if not sys.platform.startswith("linux"):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.stop)
    return int.from_bytes(info[_LAST_ACK], sys.byteorder) / 1000
