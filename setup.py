"""Installs the three packages of the library; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# Each range was tried at both ends (CONTRIBUTING.md says how); raise an upper bound only after the tests passed with it.
DEPENDENCIES = ["torch>=2.11,<2.14", "jax>=0.10,<0.12", "numpy>=2.0,<3"]

EXTRAS = {
    "gpu": ["jax[cuda13]>=0.10,<0.12", "jax-triton>=0.3.1", "triton>=3.6"],
    "tpu": ["libtpu>=0.0.42"],
    # torch-xla 2.9 loads only beside torch 2.9, so it lives in an environment of its own.
    "xla": ["torch-xla>=2.9"],
    "transformers": ["transformers>=4.48"],
    # ruff's formatter changes between minor versions, so it is held to one.
    "dev": [
        "pytest>=9,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<3",
        "matplotlib>=3.9,<4",
        "tqdm>=4.66,<5",
    ],
}

setup(
    name="ring-attn",
    version="0.1.0",
    description="Ring attention for PyTorch and JAX: exact attention over a sequence that is split between devices",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=[f"{room}{rest}" for room in ("ring_attn", "torch_bridge", "jax_core") for rest in ("", ".*")]),
    package_data={"jax_core": ["tune/**/*.json"]},
    python_requires=">=3.11",
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
