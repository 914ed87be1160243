"""Programs that tests have compiled, kept on disk for the next run: they compile hundreds of small ones, the same each time."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from jax_core.caches import VARIABLE

FOLDER = "RING_ATTN_PROGRAMS_OF_TESTS"


def folder() -> str:
    """Of the environment that runs the tests, unless the variable names another; nothing is kept beside a Python of the system."""
    own = str(Path(sys.prefix) / "programs-of-tests") if sys.prefix != sys.base_prefix else "off"
    return os.environ.get(FOLDER, own)


def keep_programs() -> None:
    """As the library keeps a job's programs, in a folder apart: its other caches stay as a test wants them."""
    from torch_bridge.job.compilation_cache import keep_programs as keep

    with patch.dict(os.environ, {VARIABLE: folder()}):
        keep()
    _change_who_writes()


def _change_who_writes() -> None:
    """Every rank writes: on CPUs a program has another key on each, and JAX lets the first one alone. Nothing is written for
    hardware that is not here: JAX cannot read it again."""
    with suppress(ImportError, AttributeError):
        from jax._src import compiler

        write, first = compiler._cache_write, SimpleNamespace(global_state=SimpleNamespace(process_id=0))

        def write_as_the_first(*arguments: Any) -> None:
            if any(isinstance(argument, compiler._jax.CompileOnlyPyClient) for argument in arguments):
                return
            with patch.object(compiler, "distributed", first):
                write(*arguments)

        compiler._cache_write = write_as_the_first
