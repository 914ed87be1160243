"""docs/environment.md has every environment variable that the library reads or sets, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK|(?:no|http|https|grpc|no_grpc)_proxy"


def read_by_the_library() -> set[str]:
    """What looks like one, in the modules that look at the environment."""
    found = set()
    for folder in ("ring_attn", "torch_bridge", "jax_core"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            if "environ" in source:
                texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
                found |= {text for text in texts if isinstance(text, str) and re.fullmatch(NAME, text)}
    return found


def test_every_variable_has_a_row_and_every_row_a_reader():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 15
    assert named == read_by_the_library() - {"O_NONBLOCK"}  # a flag of files
