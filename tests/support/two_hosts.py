"""Two hosts on this machine: network namespaces joined by a cable, each with a name and a file of hosts of its own.

They need no privileges where the kernel lets a user have namespaces; :func:`refusal` says where it does not. Each host is also a
namespace of processes, so whatever was started on it ends with it, and it ends with the process that made it.
"""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

INTERFACE = "eth0"
_NEW_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Host:
    """``holder``: the process with which the host ends."""

    name: str
    address: str
    holder: "subprocess.Popen[str]"

    def run(self, *command: str) -> None:
        """A command that sets the host up; RuntimeError, with what it says, if it fails."""
        done = subprocess.run([*self._enter(), *command], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} on host {self.name}: {done.stderr.strip()}")

    def start(self, command: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
        """A process of the host, with its output and its errors in pipes."""
        processes = f"--pid=/proc/{self.holder.pid}/ns/pid_for_children"
        return subprocess.Popen(
            [*self._enter(processes), *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        """Kills every process of the host at once. The kernel closes their connections."""
        self.holder.kill()
        self.holder.wait()

    def unplug(self) -> None:
        """The host runs on, but nothing reaches it and it reaches nothing: no connection is closed."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def _enter(self, *more: str) -> list[str]:
        where = f"--target={self.holder.pid}", "--user", "--preserve-credentials", "--net", "--uts", "--mount"
        return ["nsenter", *where, *more, "--"]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts "east" and "west", which reach each other by address alone: each resolves its own name, to 127.0.1.1 as on Debian, and
    not the other's. RuntimeError where this machine cannot have them."""
    with ExitStack() as stack:
        east = Host("east", "10.77.0.1", _hold(stack, "unshare", "--user", "--map-root-user"))
        west = Host("west", "10.77.0.2", _hold(stack, *east._enter()[:4], "unshare"))
        cable = "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(west.holder.pid)
        east.run(*cable)
        names = Path(stack.enter_context(TemporaryDirectory())) / "hosts"
        for host in (east, west):
            names.with_suffix(f".{host.name}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            host.run("mount", "--bind", str(names.with_suffix(f".{host.name}")), "/etc/hosts")
            host.run("hostname", host.name)
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                host.run("ip", "link", "set", link, "up")
        yield east, west


@cache
def refusal() -> str:
    """Why this machine cannot have two hosts; empty if it can."""
    try:
        with two_hosts():
            return ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"two hosts need namespaces of users, networks, mounts and processes, which this machine does not allow: {error}"


def _hold(stack: ExitStack, *command: str) -> "subprocess.Popen[str]":
    """A process in namespaces of its own, which ends when this one does, as its input ends then."""
    holding = [*command, *_NEW_NAMESPACES, "sh", "-c", "echo ready; exec cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = stack.enter_context(subprocess.Popen(holding, text=True, **pipes))  # type: ignore[call-overload]
    stack.callback(holder.kill)
    if holder.stdout.readline() != "ready\n":
        raise RuntimeError(f"{' '.join(holding)}: {holder.stderr.read().strip()}")
    return holder
