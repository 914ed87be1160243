"""The programs of this folder in processes of their own, as from a user's shell."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
RANKS = GPUS and max(GPUS, int(os.environ.get("RANKS", "0")))  # more than GPUs share them (shared.py)
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # to all jobs, whatever this process takes of it (conftest.py)
LIMIT = float(os.environ.get("LIMIT", "inf"))  # seconds, where the tests' own are too many
OF_CONFTEST = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")


def need(ranks: int) -> None:
    """Leaves a test out where there are fewer."""
    if ranks > RANKS:
        pytest.skip(f"ranks needed: {ranks}, here: {RANKS}, GPUs: {GPUS}; with RANKS={ranks} ranks share them")


def torchrun(processes: int, worker: str, *arguments: str, timeout: float = 280, **variables: str) -> tuple[bool, str]:
    """Whether ``worker``, a path from the repository's root, ended well in all processes, and what they printed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    shared = ("tests/gpu/shared.py", str(GPUS)) if 0 < GPUS < processes else ()
    return run(*launcher, *shared, worker, *arguments, timeout=timeout, **variables)


def run(*arguments: str, timeout: float = 280, **variables: str) -> tuple[bool, str]:
    """The same of one Python program. One that is not done in time is ended, and what was printed ends with where it was."""
    limit, job = min(timeout, LIMIT), uuid4().hex
    kept = {name: value for name, value in os.environ.items() if name not in OF_CONFTEST}
    if VISIBLE is not None:
        kept["CUDA_VISIBLE_DEVICES"] = VISIBLE
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "RING_ATTN_TESTS_JOB": job, **variables}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as program:
        try:
            said, _ = program.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            said = _ended(program, job) + f"\nnot done after {limit:g} s"
    return program.returncode == 0, said


def _ended(program: "subprocess.Popen[str]", job: str) -> str:
    """What it printed, once it and all that it has started are gone: torchrun's workers outlive a torchrun that is killed."""
    _signal(job, signal.SIGABRT)  # Python says where each thread is
    try:
        said, _ = program.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        _signal(job, signal.SIGKILL)
        said, _ = program.communicate()
    return said


def _signal(job: str, number: int) -> None:
    """All are stopped first: none goes on because another has ended (and let go of a lock)."""
    processes = [process for process in Path("/proc").glob("[0-9]*") if _is_of(job, process)]
    for process in processes:
        _kill(process, signal.SIGSTOP)
    for process in processes:
        _kill(process, number)
        _kill(process, signal.SIGCONT)
        time.sleep(0.5)  # one speaks after another


def _is_of(job: str, process: Path) -> bool:
    with suppress(OSError):
        return job.encode() in (process / "environ").read_bytes()
    return False


def _kill(process: Path, number: int) -> None:
    with suppress(OSError):
        os.kill(int(process.name), number)
