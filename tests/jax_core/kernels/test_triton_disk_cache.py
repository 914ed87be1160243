"""Triton's kernels on disk, with a stand-in for jax-triton and its compiler."""

import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from jax_core.kernels.triton import disk_cache

pytest.importorskip("triton")


@dataclass
class Result:
    binary: str
    name: str
    shared_mem_bytes: int
    ttgir: str | None
    llir: str | None


class Compiler:
    """Stands for jax_triton.triton_lib."""

    CompilationResult = Result

    def __init__(self):
        self.asked = []

    def compile_ttir_inplace(self, ir, backend, options, *target):
        self.asked.append((ir, target))
        return Result(f"ptx of {ir} for {target}", "kernel", 1024, "ttgir", "llir")


def backend(name="cuda"):
    return SimpleNamespace(target=SimpleNamespace(backend=name))


def options(text="warps 4"):
    return SimpleNamespace(hash=lambda: text)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("RING_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(disk_cache.metadata, "version", lambda package: "1.0")
    return fresh(monkeypatch)


def fresh(monkeypatch):
    """What a new process has."""
    compiler, library = Compiler(), types.ModuleType("stand_in")
    monkeypatch.setitem(sys.modules, "stand_in", library)
    monkeypatch.setitem(sys.modules, "stand_in.triton_lib", compiler)
    disk_cache.keep(library)
    disk_cache.keep(library)  # a second time changes nothing
    return compiler


def test_a_second_process_compiles_nothing(compiler, monkeypatch):
    first = compiler.compile_ttir_inplace("ir", backend(), options(), 90, "cuda")
    assert first.ttgir == "ttgir"
    second = fresh(monkeypatch)
    found = second.compile_ttir_inplace("ir", backend(), options(), 90, "cuda")
    assert not second.asked
    assert (found.binary, found.name, found.shared_mem_bytes) == (first.binary, first.name, first.shared_mem_bytes)


CHANGES = {"ir": ("other", "warps 4", 90), "options": ("ir", "warps 8", 90), "target": ("ir", "warps 4", 100)}


@pytest.mark.parametrize("change", [*CHANGES, "version", "setting"])
def test_another_kernel_is_compiled(compiler, monkeypatch, change):
    compiler.compile_ttir_inplace("ir", backend(), options(), 90, "cuda")
    if change == "version":
        monkeypatch.setattr(disk_cache.metadata, "version", lambda package: "1.1")
    if change == "setting":
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere")
    ir, given, target = CHANGES.get(change, ("ir", "warps 4", 90))
    compiler.compile_ttir_inplace(ir, backend(), options(given), target, "cuda")
    assert len(compiler.asked) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"binary": "x"}', b"\xff", b"[" * 100_000])
def test_a_broken_file_is_written_again(compiler, tmp_path, content):
    def call():
        return compiler.compile_ttir_inplace("ir", backend(), options(), 90, "cuda").binary

    right = call()
    (path,) = (tmp_path / "triton").glob("*.kernel")
    path.write_bytes(content)
    assert call() == right and len(compiler.asked) == 2
    assert call() == right and len(compiler.asked) == 2


def test_kernels_whose_files_were_swapped_are_compiled_again(compiler, tmp_path):
    def call():
        return [compiler.compile_ttir_inplace(ir, backend(), options(), 90, "cuda").binary for ir in ("one", "two")]

    right = call()
    first, second = (tmp_path / "triton").glob("*.kernel")
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    assert call() == right and len(compiler.asked) == 4


@pytest.mark.parametrize("why", ["off", "dump", "another backend", "no room", "another Triton"])
def test_where_nothing_is_kept(compiler, monkeypatch, tmp_path, why):
    if why == "off":
        monkeypatch.setenv("RING_ATTN_CACHE", "off")
    if why == "dump":
        monkeypatch.setenv("JAX_TRITON_DUMP_DIR", "/somewhere")
    if why == "no room":
        (tmp_path / "triton").touch()
    if why == "another Triton":
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", types.ModuleType("libtriton"))
    for _ in range(2):
        compiler.compile_ttir_inplace("ir", backend("hip" if why == "another backend" else "cuda"), options(), 90, "cuda")
    assert len(compiler.asked) == 2 and not list(tmp_path.rglob("*.kernel"))


def test_a_jax_triton_without_that_function_is_left_alone(monkeypatch):
    library, parts = types.ModuleType("stand_in"), types.ModuleType("stand_in.triton_lib")
    monkeypatch.setitem(sys.modules, "stand_in", library)
    monkeypatch.setitem(sys.modules, "stand_in.triton_lib", parts)
    disk_cache.keep(library)
    assert not hasattr(parts, "compile_ttir_inplace")
    disk_cache.keep(types.ModuleType("another_stand_in"))  # without the module, too
