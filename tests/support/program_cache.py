"""Programs that tests have compiled, kept on disk for the next run: they compile hundreds of small ones, the same each time."""

import os
import sys
from contextlib import suppress
from pathlib import Path
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
    from torch_bridge.start.compilation_cache import keep_programs as keep

    with patch.dict(os.environ, {VARIABLE: folder()}):
        keep()
    _write_none_of_other_hardware()


def _write_none_of_other_hardware() -> None:
    """JAX cannot read again what it has compiled for hardware that is not here."""
    with suppress(ImportError, AttributeError):
        from jax._src import compiler

        write = compiler._cache_write

        def write_own(*arguments: Any) -> None:
            if not any(isinstance(argument, compiler._jax.CompileOnlyPyClient) for argument in arguments):
                write(*arguments)

        compiler._cache_write = write_own
