"""What is installed, and whether it is what this library was tried with."""

import platform
from collections.abc import Iterator
from importlib import metadata

import torch

from ring_attn.doctor.finding import Finding
from ring_attn.version import __version__

PACKAGES = (
    *("torch", "jax", "jaxlib", "numpy", "triton", "jax-triton", "jax-cuda13-plugin", "flash-attn-4", "nvidia-cutlass-dsl"),
    *("transformers", "accelerate", "trl", "diffusers", "torchtitan"),
)


def installed() -> dict[str, str]:
    """The versions of those packages that are there."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check() -> Iterator[Finding]:
    yield Finding("ring-attn", "note", f"{__version__}; Python {platform.python_version()}, {platform.platform()}")
    yield Finding("packages", "note", ", ".join(f"{name} {version}" for name, version in installed().items()))
    driver = _driver()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability, memory = f"compute capability {gpu.major}.{gpu.minor}", f"{gpu.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {index}", "note", f"{gpu.name}, {capability}, {memory}; CUDA {torch.version.cuda}{driver}")
    yield from _out_of_bounds()


def _driver() -> str:
    """The newest CUDA that the driver runs; empty where this torch cannot tell it."""
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"; driver for CUDA {version // 1000}.{version % 1000 // 10}" if version else ""


def _out_of_bounds() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(text) for text in metadata.requires("ring-attn") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        text = "not compared with what was tried: for this ring-attn must be installed, and the package packaging"
        yield Finding("versions", "note", text)
        return
    there = installed()
    wrong = {
        f"{one.name} {there[one.name]} (tried: {one.specifier})"
        for one in asked
        if one.name in there and not one.specifier.contains(there[one.name], prereleases=True)
    }
    if wrong:
        yield Finding("versions", "wrong", f"outside of what was tried: {', '.join(sorted(wrong))}; install one within the bounds")
    else:
        yield Finding("versions", "right", "all within what was tried")
