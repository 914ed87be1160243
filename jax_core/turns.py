"""Processes of one host take turns: one compiles what is not kept yet, while the others wait, and read what it has kept. Standard
library only.

The locks are the system's, so that of a process which has died is free. A thread holds one at a time, and none while it waits: no
two can wait for each other.
"""

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: everybody's turn is now
    fcntl = None  # type: ignore[assignment]

LIMIT = 120.0  # seconds after which a process that waits compiles for itself
_LOOK_AGAIN = 0.01
_LOCKS = 4096  # files of a folder at most: programs that share one, which are rare, are compiled one after another


class _OfThisThread(threading.local):
    takes_turns = False
    lock: int | None = None  # the file descriptor of the lock that is held


_here = _OfThisThread()


@contextmanager
def in_turn() -> Iterator[None]:
    """In this block, of all processes of the host that look for something that is not kept (``caches.read_cached``), one goes on at
    once, to make it. Each of the others goes on when that one has written it, or leaves the block without: it failed, or died."""
    before, _here.takes_turns = _here.takes_turns, True
    try:
        yield
    finally:
        _here.takes_turns = before
        end_turn()


def end_turn() -> None:
    """What this thread was to make is written."""
    lock, _here.lock = _here.lock, None
    if lock is not None:
        _close(lock)


def await_turn(path: Path, is_there: Callable[[], bool]) -> None:
    """Returns once ``is_there``, or once it is this process' turn to make what is to be at ``path``: at once outside of
    :func:`in_turn`, where the folder cannot be written, and where there are no locks; at the latest after ``LIMIT`` seconds."""
    if not _here.takes_turns or fcntl is None:
        return
    end_turn()
    try:
        lock = _opened(path)
    except OSError:
        return
    try:
        if _is_locked(lock, path, is_there):
            _here.lock, lock = lock, -1
    except OSError:
        pass
    finally:
        if lock >= 0:
            os.close(lock)


def _opened(path: Path) -> int:
    folder = path.parent / "turns"
    folder.mkdir(mode=0o700, exist_ok=True)
    number = int.from_bytes(hashlib.sha256(os.fsencode(path.name)).digest()[:8], "big") % _LOCKS
    return os.open(folder / str(number), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _is_locked(lock: int, path: Path, is_there: Callable[[], bool]) -> bool:
    """Whether this process has the lock; False where there is no more need of it."""
    until = time.monotonic() + LIMIT
    while not _locks(lock):
        if is_there():
            return False
        if time.monotonic() > until:
            warnings.warn(
                f"another process of this host has been compiling {path.name} for {LIMIT:g} s, so this one compiles it, too; see "
                "whether that one hangs, for instance with py-spy dump",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        time.sleep(_LOOK_AGAIN)
    return True


def _locks(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(lock: int) -> None:
    """A child that was forked meanwhile has the same lock open: closing would leave it locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)
