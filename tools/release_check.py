"""Whether this tree may be released: `python tools/release_check.py` says what is missing, and ends with 1.

Where a tag has started it, in GitHub's workflow, the tag must be the version's.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def assigned(setup: str, name: str) -> Any:
    """The literal that the source of setup.py gives that name."""
    for node in ast.parse(setup).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name:
                return ast.literal_eval(node.value)
    raise ValueError(f"setup.py must assign {name}")


def version_in(setup: str) -> str:
    calls = [node for node in ast.walk(ast.parse(setup)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"]
    (version,) = [keyword.value for keyword in calls[0].keywords if keyword.arg == "version"]
    return str(ast.literal_eval(version))


def missing(root: Path = ROOT, variables: Mapping[str, str] = os.environ) -> Iterator[str]:
    setup, changes, citation = ((root / name).read_text(encoding="utf-8") for name in ("setup.py", "CHANGELOG.md", "CITATION.cff"))
    home, version = assigned(setup, "HOME"), version_in(setup)
    if not re.fullmatch(r"https://[^/\s]+/\S*[^/\s]", home or ""):
        yield f"setup.py: HOME must be the https address where the project is public, without a slash at its end; it is {home!r}"
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        yield f"CHANGELOG.md: a heading '## {version} (YYYY-MM-DD)' must say when it was released"
    if f"version: {version}\n" not in citation:
        yield f"CITATION.cff: its version must be {version}"
    tag = variables.get("GITHUB_REF_NAME") if variables.get("GITHUB_REF_TYPE") == "tag" else None
    if tag and tag != f"v{version}":
        yield f"the tag must be v{version}, the version of setup.py; it is {tag}"


if __name__ == "__main__":
    reasons = list(missing())
    print("\n".join(reasons) or "ready")
    sys.exit(bool(reasons))
