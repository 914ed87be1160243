"""This library's version: that of the installed package, or of setup.py where the sources are used without an installation."""

import re
from importlib import metadata
from pathlib import Path


def _version() -> str:
    try:
        return metadata.version("ring-attn")
    except metadata.PackageNotFoundError:
        setup = Path(__file__).parents[1] / "setup.py"
        match = re.search(r'version="([^"]+)"', setup.read_text(encoding="utf-8")) if setup.is_file() else None
        return f"{match[1]}+source" if match else "unknown"


__version__ = _version()
