"""What is said of the package is so: extras that pages and errors name exist, and the files of a release agree."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Extras whose packages have no release for a Python.
NOT_FOR = {"torch-tpu": ("3.11",)}


def assigned(name: str) -> ast.expr:
    """What setup.py gives that name."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return found[0]


def extras() -> set[str]:
    return set(ast.literal_eval(assigned("EXTRAS")))


def test_every_extra_that_is_named_exists():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "benchmarks/gpu.md"]
    files += [file for folder in ("ring_attn", "torch_bridge", "jax_core") for file in (ROOT / folder).rglob("*.py")]
    named = set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "ring-attn[" not in text, f"{file}: on no index yet; pip install '.[extra]' in a checkout"
        for extra in re.findall(r"pip install [\"']?\.\[([\w,-]+)\]", text):
            named |= set(extra.split(","))
    assert len(named) > 5 and named <= extras(), named - extras()


def test_a_release_has_one_version():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    version = re.search(r'version="([^"]+)"', setup)[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"Version {version}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_bounds_of_the_pages_are_those_of_setup():
    torch = next(text for text in ast.literal_eval(assigned("DEPENDENCIES")) if text.startswith("torch"))
    assert torch == "torch>=2.11,<2.14"
    for page in ("README.md", "docs/install.md"):
        assert "2.11 to 2.13" in (ROOT / page).read_text(encoding="utf-8"), page
