"""What has tripped others: settings and installations that work, and not as one thinks."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from jax_core.caches import VARIABLE, cache_folder
from ring_attn.doctor.finding import Finding


def check() -> Iterator[Finding]:
    yield from _torch_without_cuda()
    yield from _jax_memory()
    yield from _variables()
    yield _cache()


def _torch_without_cuda() -> Iterator[Finding]:
    if torch.version.cuda is None and (names := _nvidia_gpus()):
        text = f"torch is built without CUDA, and this machine has {', '.join(names)}: install torch's CUDA build"
        yield Finding("torch's build", "wrong", text)


def _nvidia_gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


def _jax_memory() -> Iterator[Finding]:
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false").lower() not in ("false", "0"):
        text = "is on: JAX takes 75 % of a GPU that torch uses too; leave it out, or set it to false"
        yield Finding("XLA_PYTHON_CLIENT_PREALLOCATE", "wrong", text)
    if fraction := os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        yield Finding("XLA_PYTHON_CLIENT_MEM_FRACTION", "note", f"JAX may take no more than {fraction} of a GPU's memory")
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async") in ("default", "bfc"):
        text = "a pool that grows by doubling and gives nothing back; leave it out for cuda_async"
        yield Finding("XLA_PYTHON_CLIENT_ALLOCATOR", "note", text)


def _variables() -> Iterator[Finding]:
    unknown = sorted(name for name in os.environ if name.startswith("RING_ATTN_") and name != VARIABLE)
    if unknown:
        yield Finding("variables", "note", f"{', '.join(unknown)}: this library reads {VARIABLE} and no other of its own")
    nccl = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NCCL_"))
    if nccl:
        yield Finding("NCCL", "note", f"set here: {', '.join(nccl)}")


def _cache() -> Finding:
    folder = cache_folder()
    if folder is None:
        return Finding(
            "cache", "note", f"nothing is kept on disk: each job compiles its programs again ({VARIABLE} names a folder)"
        )
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    if not os.access(there, os.W_OK):
        return Finding("cache", "wrong", f"{folder} cannot be written: name another folder in {VARIABLE}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    return Finding("cache", "right", f"{folder}, {size / 2**20:.0f} MiB")
