"""What is said of the package is so: extras that pages and errors name exist, and the files of a release agree."""

import ast
import re
from pathlib import Path

import pytest
import setuptools

from tools.release_check import assigned, missing, version_in

ROOT = Path(__file__).parents[1]
# Extras whose packages have no release for a Python.
NOT_FOR = {"torch-tpu": ("3.11",)}
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def extras() -> set[str]:
    return set(assigned(SETUP, "EXTRAS"))


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
    version = version_in(SETUP)
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"Version {version}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_bounds_of_the_pages_are_those_of_setup():
    torch = next(text for text in assigned(SETUP, "DEPENDENCIES") if text.startswith("torch"))
    assert torch == "torch>=2.11,<2.14"
    for page in ("README.md", "docs/install.md"):
        assert "2.11 to 2.13" in (ROOT / page).read_text(encoding="utf-8"), page


RELEASED = """
HOME{type} = {home}
setup(name="ring-attn", version="1.2.3")
"""
PUBLIC = '"https://example.org/ring-attn"'


def told(folder, home, type=": str | None", **variables):
    (folder / "setup.py").write_text(RELEASED.format(type=type, home=home))
    (folder / "CHANGELOG.md").write_text("## 1.2.3 (2026-12-01)\n")
    (folder / "CITATION.cff").write_text("version: 1.2.3\n")
    return list(missing(folder, variables))


@pytest.mark.parametrize("type", ["", ": str | None", ": Final"])
@pytest.mark.parametrize("home", ["None", '""', '"http://example.org/ring-attn"', '"https://"', '"https://example.org/a/"'])
def test_no_release_without_an_address(tmp_path, home, type):
    (reason,) = told(tmp_path, home, type)
    assert reason.startswith("setup.py: HOME must be the https address") and home[1:-1] in reason
    assert not told(tmp_path, PUBLIC, type)


def test_no_release_by_another_tag(tmp_path):
    (reason,) = told(tmp_path, PUBLIC, GITHUB_REF_NAME="v1.2.4", GITHUB_REF_TYPE="tag")
    assert reason == "the tag must be v1.2.3, the version of setup.py; it is v1.2.4"
    assert not told(tmp_path, PUBLIC, GITHUB_REF_NAME="v1.2.3", GITHUB_REF_TYPE="tag")
    assert not told(tmp_path, PUBLIC, GITHUB_REF_NAME="main", GITHUB_REF_TYPE="branch")


def test_a_release_resolves_every_extra():
    assert "- run: make package RESOLVE=1\n" in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def given_to_setup(monkeypatch, home):
    """What setup.py gives setuptools with another HOME."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    tree = ast.parse(SETUP)
    (node,) = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "HOME"]
    node.value = ast.copy_location(ast.Constant(home), node.value)
    exec(compile(tree, "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
    return given


def test_the_links_of_the_description_are_absolute_where_the_project_is_public(monkeypatch):
    readme, home = (ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/ring-attn"
    assert given_to_setup(monkeypatch, None)["long_description"] == readme
    public = given_to_setup(monkeypatch, home)["long_description"]
    linked = re.findall(r"\]\(([^)]+)\)", public) + re.findall(r'(?:src|srcset)="([^"]+)"', public)
    assert len(linked) > 10 and all(link.startswith(("https://", "#")) for link in linked), linked
    for path in re.findall(rf"{home}/(?:blob|raw)/main/([^)#\s\"]+)", public):
        assert (ROOT / path).is_file(), path
    assert re.sub(rf"{home}/(blob|raw)/main/", "", public) == readme  # nothing else has changed
    assert f'srcset="{home}/raw/main/docs/pictures/' in public  # the file itself, where a page shows it
