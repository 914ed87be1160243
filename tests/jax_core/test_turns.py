"""What is not kept yet is made by one at a time; nobody waits for who will not write."""

import subprocess
import sys
import threading
import time

import pytest

from jax_core import caches, turns
from jax_core.caches import read_cached, write_cached
from jax_core.turns import await_turn, in_turn

HOLDER = """
import sys, time
from pathlib import Path
from jax_core.caches import read_cached
from jax_core.turns import in_turn
with in_turn():
    assert read_cached(Path(sys.argv[1])) is None
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "programs" / "one"


@pytest.fixture(autouse=True)
def made(path):
    path.parent.mkdir(mode=0o700)


class Other(threading.Thread):
    """Asks for a program in turn. ``content``: what it writes if it is to make it."""

    def __init__(self, path, content=None):
        super().__init__()
        self.path, self.content, self.found, self.told = path, content, None, threading.Event()
        self.start()

    def run(self):
        with in_turn():
            self.found = read_cached(self.path)
            self.told.set()
            if self.found is None and self.content is not None:
                write_cached(self.path, self.content)

    def waits(self):
        return not self.told.wait(0.2)


def test_the_others_read_what_the_first_one_wrote(path):
    with in_turn():
        assert read_cached(path) is None
        others = [Other(path, b"another") for _ in range(2)]
        assert all(other.waits() for other in others)
        write_cached(path, b"made")
        for other in others:
            other.join(5)
    assert [other.found for other in others] == [b"made"] * 2


def test_who_finds_it_at_its_turn_keeps_nobody_waiting(path, monkeypatch):
    def written_meanwhile(*asked):
        write_cached(path, b"made")
        await_turn(*asked)

    monkeypatch.setattr(caches, "await_turn", written_meanwhile)
    with in_turn():
        assert read_cached(path) == b"made"
        monkeypatch.undo()
        path.unlink()
        assert not Other(path).waits()


def test_one_after_another_where_nothing_is_written(path):
    with in_turn():
        read_cached(path)
        other = Other(path, b"made")
        assert other.waits()
    other.join(5)
    assert other.found is None and read_cached(path) == b"made"


def test_a_turn_ends_with_an_error(path):
    def fails():
        with in_turn():
            read_cached(path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    other = Other(path)
    assert not other.waits()


def test_who_has_died_is_not_waited_for(path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mine\n"
        other = Other(path)
        assert other.waits()
        holder.kill()
        assert not other.waits()


def test_who_takes_too_long_is_waited_for_no_longer(path, monkeypatch):
    monkeypatch.setattr(turns, "LIMIT", 0.3)
    with in_turn():
        read_cached(path)
        with pytest.warns(RuntimeWarning, match="has been compiling one for 0.3 s, so this one"):
            (other := Other(path)).join(5)
    assert other.told.is_set() and other.found is None


def test_nobody_waits_while_others_wait_for_him(path):
    """Two that want the same programs in different orders."""
    second = path.with_name("another")
    assert turns._opened(path) != turns._opened(second)
    with in_turn():
        read_cached(path)
        read_cached(second)
        other = Other(path)
        assert not other.waits()


@pytest.mark.parametrize("why", ["outside", "no folder", "no locks"])
def test_nobody_waits_without_turns(path, why, monkeypatch):
    if why == "no folder":
        (path.parent / "turns").write_text("a file in its place")
    if why == "no locks":
        monkeypatch.setattr(turns, "fcntl", None)
    started = time.monotonic()
    with in_turn():
        read_cached(path)
        if why == "outside":
            threading.Thread(target=read_cached, args=(path,)).start()
        else:
            assert not Other(path).waits()
    assert time.monotonic() - started < 5
