"""Where the coordinator listens: nowhere that the job's ranks do not need. Imports nothing of torch or JAX."""

import ipaddress
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
ALL = ""


def loopback() -> str:
    """A text that is the same for all processes that reach one another at the loopback address: those of one network namespace of
    one kernel. Two hosts may have the same name."""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {kernel} {os.readlink('/proc/self/ns/net')}"
    return f"{socket.gethostname()} {uuid.getnode()}"


def meeting_place(name: str, loopbacks: Sequence[str]) -> tuple[str, str]:
    """The address at which rank 0's host listens (:data:`ALL` for every one that it has), and the one at which the ranks reach it.

    ``name``: the name or address under which the others know this host; ``loopbacks``: of all ranks. A name that means no interface
    of this host, such as that of a service in front of it, or 127.0.1.1 on Debian, leaves no choice but to listen on all.
    """
    if len(set(loopbacks)) == 1:
        return LOOPBACK, LOOPBACK
    address = next(filter(_is_of_an_interface, _addresses(name)), ALL)
    return address, address or name


def _addresses(name: str) -> list[str]:
    with suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def _is_of_an_interface(address: str) -> bool:
    """Of this host, and such that other hosts can use it as it is."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or ip.is_unspecified or ip.is_link_local:
        return False
    with suppress(OSError):
        listen(address).close()
        return True
    return False


def listen(address: str, backlog: int = 1) -> socket.socket:
    """A socket that listens at this address and a free port; :data:`ALL` includes IPv6 where the host has it."""
    if address == ALL and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def with_port(address: str, port: int) -> str:
    """As gRPC takes it."""
    if address == ALL:
        return f"[::]:{port}"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
