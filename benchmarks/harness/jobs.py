"""Benchmarks that others start under torchrun, each a session of its own, and which say what they found in lines of JSON."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from benchmarks.harness.report import ROOT

# Variables of the job that starts another.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


def begin(processes: int, module: str, *arguments: str, out: int | IO[str], **variables: str) -> "subprocess.Popen[str]":
    """``module`` in so many processes; what they print goes to ``out``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    settings: dict[str, Any] = dict(cwd=ROOT, env=kept | variables, text=True, stdout=out, stderr=subprocess.STDOUT)
    return subprocess.Popen([*torchrun, "-m", module, *arguments], **settings, start_new_session=True)


def first_error(said: Sequence[str], otherwise: str) -> str:
    """The first error among the lines of a job that failed, or its last line."""
    errors = [line.strip() for line in said if "rror:" in line] or [line.strip() for line in said[-1:]] or [otherwise]
    return errors[0][:300]
