"""Memory that torch and JAX share on GPUs, under a device that is far behind: the checks of ``memory_worker.py`` on
rings of one and two. ``make test-gpu`` runs them."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.gpu.memory_worker import ALONE, CHECKS, TOGETHER

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).with_name("memory_worker.py")
ROOT = Path(__file__).parents[2]


def run(processes: int, *checks: str, **variables: str) -> tuple[bool, str]:
    """Whether the worker ended as it should, and what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    unset = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")  # of conftest.py
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **variables}
    done = subprocess.run(
        [*command, str(WORKER), *checks],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode == 0 and "the end" in done.stdout, done.stdout


@cache
def all_checks(size: int) -> tuple[bool, str]:
    return run(size)


@pytest.mark.parametrize("size", [1, 2])
def test_the_end_of_the_interpreter(size):
    if size > torch.cuda.device_count():
        pytest.skip(f"{size} GPUs are needed")
    ended, said = all_checks(size)
    assert ended, said


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [1, 2])
def test_memory(size, check):
    if size > torch.cuda.device_count():
        pytest.skip(f"{size} GPUs are needed")
    if check in (ALONE if size > 1 else TOGETHER):
        pytest.skip("a ring of one has no other rank that could fail; the threads of two would make their calls in two orders")
    said = all_checks(size)[1]
    assert all(f"rank {rank}: {check}: ok" in said for rank in range(size)), said


@pytest.mark.parametrize("check", ["held", "storm"])
def test_with_expandable_segments(check):
    ended, said = run(1, check, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert ended, said


def test_with_the_pool_of_xla():
    """JAX's own default, which a user may have chosen."""
    ended, said = run(1, "storm", XLA_PYTHON_CLIENT_ALLOCATOR="bfc", PYTHONWARNINGS="ignore")
    assert ended, said
