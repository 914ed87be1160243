"""Triton kernels compiled once a machine. jax-triton calls the stages of Triton's compiler itself, past Triton's own cache on disk,
so what the stages give is kept here: assembler text and sizes, as JSON, which is read and never executed by Python.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

from jax_core.caches import cache_folder, parse_json, read_cached, write_cached

_STAGES = "compile_ttir_inplace"  # of jax-triton 0.3 and 0.4: Triton's IR, backend, options, and what else there is -> a dataclass
_TEXTS = ("ttgir", "llir")  # of its results, which only a dump reads


class _Backend(Protocol):
    """Triton's, of a vendor."""

    @property
    def target(self) -> "_Target": ...


class _Target(Protocol):
    backend: str


class _Options(Protocol):
    """Triton's, of a compilation."""

    def hash(self) -> str: ...


_Compiled = TypeVar("_Compiled")  # jax-triton's dataclass
_Stages = Callable[..., _Compiled]


def keep(library: ModuleType) -> None:
    """Makes jax-triton look for kernels on disk before it compiles them. A version without that function compiles each time."""
    with suppress(ImportError, AttributeError):
        parts = import_module(f"{library.__name__}.triton_lib")
        compile_kernel = getattr(parts, _STAGES)
        if not hasattr(compile_kernel, "cached"):
            setattr(parts, _STAGES, _cached(compile_kernel, parts))


def _cached(compile_kernel: _Stages[_Compiled], parts: ModuleType) -> _Stages[_Compiled]:
    def cached(ir: object, backend: _Backend, options: _Options, *target: object) -> _Compiled:
        root, key = cache_folder(), _key(ir, options, target)
        if root is None or key is None or backend.target.backend != "cuda" or os.environ.get("JAX_TRITON_DUMP_DIR"):
            return compile_kernel(ir, backend, options, *target)
        path = root / "triton" / f"{key}.kernel"
        compiled = _read(path, parts.CompilationResult)
        if compiled is None:
            compiled = compile_kernel(ir, backend, options, *target)
            _write(path, compiled)
        return compiled

    cached.cached = True  # type: ignore[attr-defined]
    return cached


def _key(ir: object, options: _Options, target: tuple[object, ...]) -> str | None:
    """Everything that the assembler text depends on; None where this version of Triton does not tell it."""
    with suppress(ImportError, AttributeError):
        versions = [metadata.version(package) for package in ("triton", "jax-triton")]
        compiler = import_module("triton._C.libtriton")
        settings = sorted(compiler.get_cache_invalidating_env_vars().items())
        ptxas = os.environ.get("TRITON_PTXAS_PATH", "")
        return hashlib.sha256(repr((str(ir), options.hash(), target, versions, settings, ptxas)).encode()).hexdigest()
    return None


def _read(path: Path, result: Callable[..., _Compiled]) -> _Compiled | None:
    """None for a kernel that is not there, or not whole: it is compiled and written again."""
    content = read_cached(path)
    with suppress(ValueError, TypeError):
        return None if content is None else result(**parse_json(content), **dict.fromkeys(_TEXTS))
    return None


def _write(path: Path, result: object) -> None:
    fields = {name: value for name, value in vars(result).items() if name not in _TEXTS}
    assert dataclasses.is_dataclass(result)
    with suppress(OSError, TypeError):  # no room, a folder of another user, or a result that is more than text and numbers
        write_cached(path, json.dumps(fields).encode())
