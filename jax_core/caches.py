"""Where the library keeps what it makes once a machine: found configurations, compiled programs. Standard library only.

Folders are this user's alone, or not used. A compiled program ends with a hash of itself and of its name.
"""

import hashlib
import json
import os
import stat
import warnings
from functools import cache
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from jax_core.turns import await_turn, end_turn

VARIABLE = "RING_ATTN_CACHE"
_OFF = ("", "0", "off")
_SEAL = hashlib.sha256().digest_size


def cache_folder(folder: str | PathLike[str] | None = None) -> Path | None:
    """The root of all caches, or None if they are off or others may write to it. It may not exist yet.

    ``folder``: what a call was given; without it the variable ``RING_ATTN_CACHE`` decides, and without that it is ``ring_attn`` in
    ``$XDG_CACHE_HOME`` or in ``~/.cache``. An empty value, "0" or "off" turns the caches off, as does a user without a home.
    """
    root = _root(os.environ.get(VARIABLE) if folder is None else folder)
    return root if root is None or _is_ours(root) else None


def _root(folder: str | PathLike[str] | None) -> Path | None:
    if folder is not None:
        text = os.fspath(folder)
        return None if text.strip().lower() in _OFF else Path(text).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    # By its specification a relative path in the variable is to be ignored.
    home = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(home) / "ring_attn" if os.path.isabs(home) else None


def _is_ours(folder: Path) -> bool:
    """Whether a folder, if it exists, belongs to this user and to no other: whoever can write to it can run code in this process.
    Otherwise one warning."""
    problem = _problem(folder)
    if problem:
        warn_once(f"the cache folder {problem}. Nothing is kept there; {VARIABLE} names another folder or turns caches off")
    return not problem


def _problem(folder: Path) -> str:
    """Why a folder is not used; empty if it is, or if it does not exist yet or cannot be reached, as whoever uses it will find."""
    try:
        known = folder.stat()
    except OSError:
        return ""
    if not hasattr(os, "geteuid") or not stat.S_ISDIR(known.st_mode):
        return ""
    if known.st_uid != os.geteuid():
        return f"{folder} is not used: it belongs to user {known.st_uid}, and this is user {os.geteuid()}"
    if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} is not used: others may write to it (chmod go-w {folder})"
    return ""


@cache
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those on the way to it, for this user alone. Raises OSError, also for one that is not this user's."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    if problem := _problem(folder):
        raise PermissionError(problem)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all, also where several write it. Makes its folder. Raises OSError."""
    make_folder(path.parent)
    with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def open_at_once(path: str, flags: int) -> int:
    """For ``open``: a pipe in place of a file does not keep the caller waiting."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_regular(path: Path) -> bytes:
    """What is in a file. Raises OSError if it cannot be read, ValueError if it is something else, such as a pipe."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
    except IsADirectoryError:
        pass
    raise ValueError(f"{path.name} is no file")


def write_cached(path: Path, content: bytes) -> None:
    """Writes a compiled program such that :func:`read_cached` finds it under this name, and as it is. Raises OSError."""
    write_whole(path, content + _seal(path, content))
    end_turn()


def read_cached(path: Path) -> bytes | None:
    """None where there is nothing, or not what was kept under this name: whoever asks compiles it, and writes it again. Within
    ``turns.in_turn`` another process that is about to write it is waited for."""
    if not _is_ours(path.parent):
        return None
    content = _read(path)
    if content is None:
        await_turn(path, path.exists)
        content = _read(path)
        if content is not None:
            end_turn()  # another has made it
    return content


def _read(path: Path) -> bytes | None:
    try:
        sealed = read_regular(path)
    except (OSError, ValueError):
        return None
    content, seal = sealed[:-_SEAL], sealed[-_SEAL:]
    return content if seal == _seal(path, content) else None


def _seal(path: Path, content: bytes) -> bytes:
    """A hash of the content and of the name, with its folder's: a program under another's name computes something else."""
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}") + b"\0" + content).digest()


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for whatever is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
