"""Starts a worker script in several real processes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
# What lies in front of the installed packages stays there: an older release under test.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
SUPPORT = ROOT / "tests" / "support"
WORKERS = SUPPORT / "workers"
# Unbuffered, as torchrun runs a script, Python writes each word of a print by itself, and those of processes that share a pipe mix.
BUFFERED = ("--no-python", sys.executable)
OF_EVERY_WORKER = {
    "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(SUPPORT)]),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "",
    "HF_HUB_OFFLINE": "1",
}
# XLA's, for small programs that run once: a third less time. What runs long is compiled as by a user, with XLA_FLAGS="".
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_numbers = count()  # of ports


def torchrun(worker: str, processes: int, *arguments: str, timeout: float = 480, **variables: str) -> str:
    """The output of ``tests/support/workers/<worker>`` on so many ranks, as torchrun would start them, one rank's after another's;
    AssertionError with all of it if one failed. Ranks are forks of a server, which saves them their imports."""
    environment = {**os.environ, **OF_EVERY_WORKER, "XLA_FLAGS": QUICK_COMPILE, **variables}
    ended = world(processes, worker, *arguments, environment=environment, timeout=timeout, together=True)
    said = "\n".join(rank.out + rank.err for rank in ended)
    assert all(rank.status == 0 for rank in ended), said
    return said


def as_a_user(*command: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a process that knows nothing of the tests' settings."""
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS", "RANK")}
    environment = {**kept, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=480, check=False
    )


@dataclass(frozen=True)
class Ended:
    """How one process ended, and when."""

    status: int
    out: str
    err: str
    at: float


def free_port() -> int:
    """Below those that the system gives out, and apart for each of pytest's workers, so that nobody takes it before its user."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for number in _numbers:
        port = 20000 + 1000 * (worker % 10) + number % 1000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError


def environment(**more: str) -> dict[str, str]:
    """This process's environment without conftest.py's eight devices, like a user's shell, and without GPUs."""
    unset = ("XLA_FLAGS", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, **OF_EVERY_WORKER, "CUDA_VISIBLE_DEVICES": "", **more}


def processes(world_size: int, script: str, *arguments: str, timeout: float = 180.0, forked: bool = True) -> list[Ended]:
    """The script as every rank of a world, without torchrun, which would itself end the survivors of a death. ``forked`` False:
    each in a Python of its own, for what depends on how an interpreter starts or ends."""
    start = world if forked else fresh_world
    return start(world_size, script, *arguments, environment=environment(), timeout=timeout)


def ranks(world_size: int) -> list[dict[str, str]]:
    """What torchrun would say in the environment, and a port for each rank's own use."""
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    own |= {f"OWN_PORT_{rank}": str(free_port()) for rank in range(world_size)}
    own["LOCAL_WORLD_SIZE"] = str(world_size)
    return [{**own, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def world(
    size: int, script: str, *arguments: str, environment: dict[str, str], timeout: float, together: bool = False
) -> list[Ended]:
    """Ranks that are forks of the server. ``together``: the first that fails ends the others, as torchrun does."""
    with TemporaryDirectory() as folder:
        files = [(f"{folder}/{rank}.out", f"{folder}/{rank}.err") for rank in range(size)]
        running = [
            _server().Process(target=forked_worker, args=(str(WORKERS / script), arguments, {**environment, **own}, *told))
            for own, told in zip(ranks(size), files, strict=True)
        ]
        with _environment_of_server():
            for process in running:
                process.start()
        at = _ends(running, timeout, together)
        texts = [[Path(file).read_text() if Path(file).exists() else "" for file in pair] for pair in files]
    late = None in at
    ended = [Ended(process.exitcode or 0, *text, moment or 0.0) for process, text, moment in zip(running, texts, at, strict=True)]
    assert not late, f"a process did not end within {timeout} s\n" + "\n".join(rank.out + rank.err for rank in ended)
    return ended


def _ends(running: list[BaseProcess], timeout: float, together: bool) -> list[float | None]:
    """When each ended; None for one that had to be killed after ``timeout``."""
    limit, at = time.monotonic() + timeout, dict.fromkeys(running, None)
    sentinels = {process.sentinel: process for process in running}
    while sentinels and (left := limit - time.monotonic()) > 0:
        for sentinel in wait(list(sentinels), left):
            process = sentinels.pop(sentinel)
            process.join()
            at[process] = time.time()
            if together and process.exitcode:
                limit = min(limit, time.monotonic() + 10)
    for process in running:
        if at[process] is None:
            process.kill()
            process.join()
    return [at[process] or (0.0 if together and any(other.exitcode for other in running) else None) for process in running]


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["forked"])
    return context


@contextmanager
def _environment_of_server() -> Iterator[None]:
    """What the server's imports read; it starts with the first process."""
    with patch.dict(os.environ, OF_EVERY_WORKER):
        yield


def forked_worker(*arguments: Any) -> None:
    import forked

    forked.become(*arguments)


def fresh_world(size: int, script: str, *arguments: str, environment: dict[str, str], timeout: float) -> list[Ended]:
    command = [sys.executable, str(WORKERS / script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env={**environment, **own}, text=True, **pipes) for own in ranks(size)]  # type: ignore[call-overload]
    return [_end(process, timeout) for process in running]


def _end(process: subprocess.Popen[str], timeout: float) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"a process did not end within {timeout} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err, time.time())
