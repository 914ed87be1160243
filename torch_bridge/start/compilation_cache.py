"""Keeps XLA's programs on disk, so that the second job on a machine does not compile them again.

This is JAX's persistent compilation cache, which holds for all programs of a process, also the user's own. A user who has set it up
keeps what was set. JAX used without torch is left alone.
"""

import hashlib
import platform
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from jax_core import internals
from jax_core.caches import VARIABLE, cache_folder, make_folder, read_cached, write_cached

_AT_ONCE = 1.0  # JAX's default for the seconds below which a program is not kept


def keep_programs() -> None:
    """Set JAX's cache to the folder of all caches. What JAX has compiled before is not kept."""
    import jax

    root = cache_folder()
    settings: Any = jax.config
    if root is None or settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    folder = root / "xla" / _hardware()
    try:
        make_folder(folder)
    except OSError as error:
        warnings.warn(
            f"compiled programs cannot be kept in {folder} ({error}), so each job compiles them again; name another folder in "
            f"{VARIABLE}, or turn this off with {VARIABLE}=off",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if settings.jax_persistent_cache_min_compile_time_secs == _AT_ONCE:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _write_whole_files(folder)


def _hardware() -> str:
    """A program for a CPU, which a process with a GPU may make too, holds its machine code, which another model may not run; one
    for a GPU says itself which it is for."""
    features = [platform.machine()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return f"cpu-{hashlib.sha256(repr(features).encode()).hexdigest()[:16]}"


def _write_whole_files(folder: Path) -> None:
    """JAX writes into the file that other processes read, unless the size of the cache is limited: then it locks. It takes a file
    for what its name says, and one that it cannot read for none, with a warning each time. Where this version's parts are not as
    expected, that is how it stays."""
    import jax

    settings: Any = jax.config
    if settings.jax_compilation_cache_max_size != -1 or settings.jax_compilation_cache_check_contents:
        return
    with suppress(ImportError, AttributeError, TypeError):
        if internals.keep_programs_with(folder, read_cached, write_cached):
            internals.share_programs()  # files are written whole
