"""A table's file: read without trust, written whole, merged under a lock."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_core.caches import make_folder, open_at_once, read_regular, write_whole
from jax_core.tune.table import NewerSchemaError, Table, from_json, joined, to_json


def read(path: Path, device: str) -> Table:
    """The table in the file; empty if there is none. A file that is not a table of this device is set aside with a warning, for the
    user to look at; that of a later release is left where it is."""
    try:
        return from_json(_read_text(path), device)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn(f"the configurations in {path} cannot be read ({error}), so none of them is used")
    except NewerSchemaError as error:
        _warn(f"the configurations in {path} are not used: {error}")
    except ValueError:
        _set_aside(path, device)
    return {}


def merge(path: Path, device: str, entries: Table) -> bool:
    """Adds ``entries`` to the file, with what others add meanwhile. Returns whether that was possible; a warning says why not."""
    try:
        make_folder(path.parent)
        with _locked(path):
            return _replace(path, device, entries)
    except OSError as error:
        _warn(f"what was found cannot be kept in {path} ({error}); set RING_ATTN_CACHE to a folder that can be written")
        return False


def _replace(path: Path, device: str, entries: Table) -> bool:
    try:
        before = from_json(_read_text(path), device) if path.exists() else {}
    except NewerSchemaError as error:
        _warn(f"what was found is not kept in {path}: {error}")
        return False
    except ValueError as error:
        _move_aside(path, error)
        before = {}
    write_whole(path, to_json(joined(before, entries), device).encode())
    return True


def _set_aside(path: Path, device: str) -> None:
    try:
        with _locked(path):
            try:
                from_json(_read_text(path), device)
            except ValueError as error:  # as it was before the lock: no other process has replaced it by a good one
                _move_aside(path, error)
    except FileNotFoundError:
        return
    except OSError as error:
        _warn(f"the configurations in {path} are not used, and the file cannot be set aside ({error})")


def _move_aside(path: Path, reason: ValueError) -> None:
    aside = path.with_name(f"{path.name}.aside-{os.getpid()}")
    try:
        os.replace(path, aside)
        _warn(f"{path} was set aside as {aside.name}: {reason}. Configurations can be found again with python -m tools.tune")
    except OSError as error:
        _warn(f"{path} is not used ({reason}), and cannot be set aside ({error})")


def _read_text(path: Path) -> str:
    return read_regular(path).decode("utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Beside the file, which is replaced. Without locks (Windows, some network file systems) the file stays whole, but what two
    processes write at the same time may be that of one of them."""
    with open(path.with_name(f".{path.name}.lock"), "a", opener=open_at_once) as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            _warn(f"{path.parent} has no locks ({error}): of two processes that write configurations at once, one may lose its own")
        yield


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
