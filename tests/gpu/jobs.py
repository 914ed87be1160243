"""The programs of this folder in processes of their own, as from a user's shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
RANKS = GPUS and max(GPUS, int(os.environ.get("RANKS", "0")))  # more than GPUs share them (shared.py)
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # to all jobs, whatever this process takes of it (conftest.py)
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
    """The same of one Python program."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_CONFTEST}
    if VISIBLE is not None:
        kept["CUDA_VISIBLE_DEVICES"] = VISIBLE
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": path, **variables},
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode == 0, done.stdout
