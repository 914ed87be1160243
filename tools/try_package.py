"""Tries what `make package` has built, away from this repository: `python tools/try_package.py FOLDER`.

The wheel is installed without its dependencies into an environment of its own, which sees the packages of this Python's, and
computes one attention. The source distribution is unpacked, and a few of its tests run in it: those of pages, messages, layouts.
With ``--resolve`` pip also finds releases for every extra, for both Pythons that are tried.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

ATTENTION = """
import torch, ring_attn
from importlib.metadata import version
assert {place!r} in ring_attn.__file__, ring_attn.__file__
assert ring_attn.__version__ == version("ring-attn")
q, k, v = torch.randn(3, 1, 100, 2, 16)
out = ring_attn.ring_attention(q, k, v, causal=True, mesh="local")
exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, exact.transpose(1, 2), rtol=1e-4, atol=1e-5)
print("the wheel's", ring_attn.__version__, "computes attention")
"""
TESTS = (
    "tests/test_package.py",
    "tests/test_errors_page.py",
    "tests/test_environment_page.py",
    "tests/jax_core/masks/test_layout.py",
)
PYTHONS = ("3.11", "3.12")


def run(*command: str | Path, folder: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *command, flush=True)
    subprocess.run(list(map(str, command)), cwd=folder, env=variables, check=True)


def try_wheel(wheel: Path, folder: Path) -> None:
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment/bin/python"
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=folder)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read: not this repository
    run(python, "-c", ATTENTION.format(place=str(packages)), folder=folder)
    run(python, "-m", "ring_attn", "--help", folder=folder)


def try_sources(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (root,) = folder.glob("ring_attn-*")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, folder=root)


def resolve(wheel: Path, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.test_package import NOT_FOR, extras

    dry = ("-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--target", folder / "nowhere")
    for extra in sorted(extras()):
        for version in PYTHONS:
            if version not in NOT_FOR.get(extra, ()):
                run(sys.executable, *dry, "--python-version", version, f"{wheel}[{extra}]", folder=folder)


def main() -> None:
    built = Path(sys.argv[1]).resolve()
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, Path(folder))
        try_sources(archive, Path(folder))
        if "--resolve" in sys.argv:
            resolve(wheel, Path(folder))


if __name__ == "__main__":
    main()
