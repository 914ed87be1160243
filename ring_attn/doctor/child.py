"""A check in a process of its own, with a limit of time."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def from_process(module: str, limit: float, environment: Mapping[str, str]) -> Any:
    """The JSON that the module prints as its last line, or in words what became of the process. It is no rank of a job."""
    variables = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            env={**variables, **environment},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"timed out after {limit:.0f} s"
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        said = done.stderr.strip().splitlines() or ["nothing"]
        return f"the check ended with exit code {done.returncode}; it said: {said[-1]}"
