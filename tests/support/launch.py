"""Starting a worker script in several real processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(worker: str, processes: int, *arguments: str, timeout: float = 240, **variables: str) -> str:
    """What ``tests/support/workers/<worker>`` printed under torchrun; AssertionError, with the whole output, when it failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XLA_FLAGS": "", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "support" / "workers" / worker), *arguments],
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
