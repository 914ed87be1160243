"""Installs the three packages of the library; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = ("ring_attn", "torch_bridge", "jax_core")

# Tried at both ends: torch 2.11.0 (with Python 3.12, jax 0.11.2) and 2.13.0 (with 3.11, jax 0.10.2), jax 0.10.0 and 0.11.2, numpy
# 2.0.2 and 2.5.2. Raise an upper bound only after the tests passed with it.
# rich draws what `python -m ring_attn doctor` prints.
DEPENDENCIES = ["torch>=2.11,<2.14", "jax>=0.10,<0.12", "numpy>=2.0,<3", "rich>=13.7,<16"]

EXTRAS = {
    # For what is to come; no release of theirs is used by this one but jax's CUDA plugin 0.11.2 and libtpu 0.0.42.
    "gpu": ["jax[cuda13]>=0.10,<0.12", "jax-triton>=0.3.1,<0.5", "triton>=3.6,<4"],
    # flash-attn-4's kernels for Hopper: beta releases, of which the kernel calls what may change, hence exact. Tried with Python
    # 3.12, jax 0.11.2, torch 2.11; compiled ahead of time with Python 3.11, jax 0.10.2.
    "hopper": [
        "jax[cuda13]>=0.10,<0.12",
        "flash-attn-4==4.0.0b36",
        "nvidia-cutlass-dsl[cu13]==4.8.1",
        "quack-kernels==0.6.5",
        "apache-tvm-ffi==0.1.15.post2",
    ],
    "tpu": ["libtpu>=0.0.42,<0.0.43"],
    # Tried with Python 3.12, torch 2.13.0, jax 0.11.2, torch-tpu 0.2.0. Its libtpu is newer than the one above: not both.
    "torch-tpu": ["torch-tpu>=0.2,<0.3"],
    # torch-xla 2.9 loads beside torch 2.9 only, so it has an environment of its own and no extra: `make xla`.
    # Each tried at both ends; transformers also between, with 4.57.6. 4.53 is its first release with an interface for masks.
    "transformers": ["transformers>=4.53,<5.24"],
    "accelerate": ["accelerate>=1.15,<1.16", "transformers>=5.23,<5.24"],
    "trl": ["trl>=1.16,<1.17", "accelerate>=1.15,<1.16", "transformers>=5.23,<5.24"],
    "diffusers": ["diffusers>=0.42,<0.43"],
    "flax": ["flax>=0.12.8,<0.13"],
    "equinox": ["equinox>=0.13.8,<0.14"],
    "torchtitan": ["torchtitan>=0.3,<0.4"],
    # ruff's formatter changes between minor versions, so it is held to one.
    "dev": [
        "pytest>=9,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<3",
        "triton>=3.6,<4; sys_platform == 'linux'",  # its interpreter and its compiler need no GPU
        "matplotlib>=3.9,<4",
        "tqdm>=4.66,<5",
    ],
}

# Where the project is public; None until it is (tools/release_check.py).
HOME: str | None = None
PAGES = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


def description() -> str:
    """README.md; where the project is public with absolute links, since relative ones lead nowhere on an index's page."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    if not HOME:
        return text
    text = re.sub(r"\]\((?!\w+:|#)", f"]({HOME}/blob/main/", text)
    return re.sub(r'\b(src|srcset)="(?!\w+:)', rf'\1="{HOME}/raw/main/', text)


setup(
    name="ring-attn",
    version="0.1.0",
    description="Ring attention for PyTorch and JAX: exact attention over a sequence that is split between devices",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",  # an SPDX expression (PEP 639)
    license_files=["LICENSE"],
    project_urls={name: HOME + path for name, path in PAGES.items()} if HOME else {},
    keywords="attention, ring attention, context parallelism, sequence parallelism, long context, PyTorch, JAX",
    packages=find_packages(include=[f"{package}{rest}" for package in PACKAGES for rest in ("", ".*")]),
    package_data={package: ["py.typed", "tune/shipped/*.json"] for package in PACKAGES},
    python_requires=">=3.11",
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
