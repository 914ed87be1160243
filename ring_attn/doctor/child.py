"""A check in a process of its own, with a limit of time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def from_process(module: str, limit: float, environment: Mapping[str, str]) -> tuple[list[dict[str, Any]], str | None]:
    """The JSON objects that the module prints as lines, before a null that ends them; and in words what became of the process if
    that did not come. It is no rank of a job."""
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
        said = errors.strip().splitlines() or ["nothing"]
        became = f"the check ended with exit code {process.returncode}; it said: {said[-1]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started: compilers hold its pipes open
        out, _ = process.communicate()
        became = f"timed out after {limit:g} s"
    lines = list(_parsed(out))
    return [each for each in lines if each is not None], None if None in lines else became


def _parsed(out: str) -> Iterator[dict[str, Any] | None]:
    """Of lines that were cut short, or that anything else has printed, nothing."""
    for line in out.splitlines():
        with suppress(json.JSONDecodeError):
            each = json.loads(line)
            if each is None or isinstance(each, dict):
                yield each
