"""Starts a worker script in several real processes."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What lies in front of the installed packages stays there: an older release under test.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
WORKERS = ROOT / "tests" / "support" / "workers"
# Unbuffered, as torchrun runs a script, Python writes each word of a print by itself, and those of processes that share a pipe mix.
BUFFERED = ("--no-python", sys.executable)
OF_EVERY_WORKER = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
# XLA's, for small programs that run once: a third less time. What runs long is compiled as by a user, with XLA_FLAGS="".
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def torchrun(worker: str, processes: int, *arguments: str, timeout: float = 240, **variables: str) -> str:
    """The output of ``tests/support/workers/<worker>`` under torchrun; AssertionError with the whole output if it failed."""
    environment = {**os.environ, **OF_EVERY_WORKER, "XLA_FLAGS": QUICK_COMPILE, **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, *BUFFERED, str(WORKERS / worker), *arguments],
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass(frozen=True)
class Ended:
    """How one process ended, and when."""

    status: int
    out: str
    err: str
    at: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """This process's environment without conftest.py's eight devices, like a user's shell, and without GPUs."""
    unset = ("XLA_FLAGS", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, **OF_EVERY_WORKER, "CUDA_VISIBLE_DEVICES": "", **more}


def processes(world: int, script: str, *arguments: str, timeout: float = 90.0) -> list[Ended]:
    """Start the script as every rank of a world, without torchrun, which would itself end the survivors of a death."""
    port = str(free_port())
    own_ports = {f"OWN_PORT_{rank}": str(free_port()) for rank in range(world)}
    running = []
    for rank in range(world):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        own = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, **own_ports}
        command = [sys.executable, str(WORKERS / script), *arguments]
        running.append(
            subprocess.Popen(command, env=environment(**ranks, **own), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return [_end(process, timeout) for process in running]


def _end(process: subprocess.Popen[str], timeout: float) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"a process did not end within {timeout} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err, time.time())
