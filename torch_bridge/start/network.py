"""JAX's connections: those of its CPU collectives reach all ranks; and those to its coordination service are passed on, their
ends here kept open when the service is lost.

JAX aborts the process from C++ as soon as such a connection breaks, as it does when the host of global rank 0 dies: before this
process could say which ranks are lost. Without an answer it waits for its heartbeat, until long after the watchdog has acted.
"""

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from jax_core import internals
from torch_bridge.failures import peers

_AT_ONCE = 65536  # bytes


def open_relay(address: str, port: int, patience: float) -> int:
    """The local port that leads to ``port`` at ``address``; connecting to that may take ``patience`` seconds."""
    listener = socket.create_server(("localhost", 0))
    _run(_accept, listener, address, port, patience)
    return int(listener.getsockname()[1])


def _run(loop: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=loop, args=arguments, name=f"ring-attn-relay{loop.__name__}", daemon=True).start()


def _accept(listener: socket.socket, address: str, port: int, patience: float) -> None:
    while True:
        here, _ = listener.accept()
        try:
            there = socket.create_connection((address, port), timeout=patience)
        except OSError:
            here.close()  # JAX tries again
        else:
            there.settimeout(None)
            _run(_to_service, here, there)
            _run(_from_service, there, here)


def _to_service(here: socket.socket, there: socket.socket) -> None:
    """Until this process closes its end."""
    with here, there, suppress(OSError):
        while data := here.recv(_AT_ONCE):
            with suppress(OSError):  # the service is lost
                there.sendall(data)
        there.shutdown(socket.SHUT_RDWR)


def _from_service(there: socket.socket, here: socket.socket) -> None:
    """Ends without closing anything."""
    with suppress(OSError):
        while data := there.recv(_AT_ONCE):
            here.sendall(data)


def leave_jax() -> None:
    """As ``jax.distributed.shutdown``, which waits minutes for a service that is lost, here or when its client is destroyed."""
    import jax

    if peers.state.cut_off:
        job = internals.job()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(job.client))
        job.client = None
    with suppress(Exception):  # the coordinator may be gone, and at exit no one could handle the error
        jax.distributed.shutdown()


def set_gloo_address(address: str) -> None:
    """Make JAX's gloo listen where the others can reach it, and nowhere else: on torch's ``GLOO_SOCKET_IFNAME``, else at the
    ``address`` with which this process reaches the coordinator. By itself it takes the address of the host's name, often
    127.0.1.1. Before the backends."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None
    internals.listen_with_gloo(None if interface else address, interface)
