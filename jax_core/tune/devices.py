"""What a configuration was found on: the device, and the versions of what compiles for it."""

import os
import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

_PACKAGES = ("jax", "jaxlib", "triton", "jax-triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")


def device_name(backend: str) -> str:
    """As JAX calls it; of a CPU, which JAX does not tell apart, its architecture and its cores."""
    if backend == "cpu":
        return f"cpu {platform.machine()} {os.cpu_count()} cores"
    try:
        return jax.local_devices(backend=backend)[0].device_kind
    except RuntimeError:  # a program for devices that this process does not have
        return f"no {backend}"


def file_name(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_") + ".json"


@cache
def versions() -> dict[str, str]:
    """Those of the packages that are installed, and of NVIDIA's driver."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**installed, **_driver()}


def _driver() -> dict[str, str]:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return {}
    number = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return {"driver": number[1]} if number else {}
