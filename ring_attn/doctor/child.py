"""A check in a process of its own, with a limit of time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def from_process(module: str, limit: float, environment: Mapping[str, str]) -> Any:
    """The JSON that the module prints as its last line, or in words what became of the process. It is no rank of a job."""
    variables = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started: compilers hold its pipes open
        process.communicate()
        return f"timed out after {limit:g} s"
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        said = errors.strip().splitlines() or ["nothing"]
        return f"the check ended with exit code {process.returncode}; it said: {said[-1]}"
