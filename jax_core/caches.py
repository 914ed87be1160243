"""Where the library keeps what it makes once a machine: found configurations, compiled programs. Standard library only."""

import os
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile

VARIABLE = "RING_ATTN_CACHE"
_OFF = ("", "0", "off")


def cache_folder(folder: str | PathLike[str] | None = None) -> Path | None:
    """The root of all caches, or None if they are off. It may not exist yet.

    ``folder``: what a call was given; without it the variable ``RING_ATTN_CACHE`` decides, and without that it is ``ring_attn`` in
    ``$XDG_CACHE_HOME`` or in ``~/.cache``. An empty value, "0" or "off" turns the caches off, as does a user without a home.
    """
    if folder is None:
        folder = os.environ.get(VARIABLE)
    if folder is not None:
        given = os.fspath(folder)
        return None if given.strip().lower() in _OFF else Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    # By its specification a relative path in the variable is to be ignored.
    home = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(home) / "ring_attn" if os.path.isabs(home) else None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all, also where several write it. Makes its folder, for this user
    alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
