"""Whether this tree may be released: `python tools/release_check.py` says what is missing, and ends with 1."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def missing() -> Iterator[str]:
    setup, changes, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "CHANGELOG.md", "CITATION.cff"))
    if "HOME: str | None = None" in setup:
        yield "setup.py: HOME must be the address where the project is public; it is None"
    version = re.search(r'version="([^"]+)"', setup)[1]  # type: ignore[index]
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        yield f"CHANGELOG.md: a heading '## {version} (YYYY-MM-DD)' must say when it was released"
    if f"version: {version}\n" not in citation:
        yield f"CITATION.cff: its version must be {version}"


if __name__ == "__main__":
    found = list(missing())
    print("\n".join(found) or "ready")
    sys.exit(bool(found))
