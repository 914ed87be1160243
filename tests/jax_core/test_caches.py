import os
import warnings
from pathlib import Path

import pytest

from jax_core import caches
from jax_core.caches import VARIABLE, cache_folder, make_folder, parse_json, read_cached, read_regular, write_cached, write_whole


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    caches.warn_once.cache_clear()


def test_the_default_is_in_the_users_cache(monkeypatch):
    assert cache_folder() == Path("/home/someone/.cache/ring_attn")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/ring_attn")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/someone/.cache/ring_attn")


def test_a_call_is_before_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "~/here")
    assert cache_folder() == Path("/home/someone/here")
    assert cache_folder(tmp_path) == tmp_path
    assert cache_folder("") is None


@pytest.mark.parametrize("value", ["", "0", "off", "OFF", " "])
def test_it_can_be_turned_off(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert cache_folder() is None


def test_a_relative_folder_does_not_move_with_the_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cache_folder("here") == tmp_path / "here"


def test_a_user_without_a_home_has_no_caches(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does for a user id that no account has
    assert cache_folder() is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_whole(path, b"first")
    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="no room"):
        write_whole(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_folders_on_the_way_are_this_users_alone(tmp_path):
    before = os.umask(0o002)
    try:
        make_folder(tmp_path / "home" / "cache" / "xla")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used_with_one_warning(tmp_path, mode):
    path = tmp_path / "cache" / "triton" / "kernel"
    write_cached(path, b"program")
    path.parents[1].chmod(mode)
    with pytest.warns(RuntimeWarning, match="cache is not used: others may write to it.*chmod go-w") as warned:
        assert cache_folder(path.parents[1]) is None and cache_folder(path.parents[1]) is None
    assert len(warned) == 1
    path.parents[1].chmod(0o755)
    assert cache_folder(path.parents[1]) == path.parents[1]
    path.parent.chmod(mode)  # a folder inside
    with pytest.warns(RuntimeWarning, match="triton is not used"):
        assert read_cached(path) is None
    with pytest.raises(PermissionError, match="others may write"):
        write_cached(path, b"program")


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match=f"is not used: it belongs to user {tmp_path.stat().st_uid}"):
        assert cache_folder(tmp_path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder(tmp_path / "new") == tmp_path / "new"


def swap(first, second):
    """Each content under the other's name."""
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def test_what_is_kept_is_found_under_its_own_name_alone(tmp_path):
    names = ["a/one", "a/two", "b/one"]
    for name in names:
        write_cached(tmp_path / name, name.encode())
    assert [read_cached(tmp_path / name) for name in names] == [name.encode() for name in names]
    for other in names[1:]:
        swap(tmp_path / names[0], tmp_path / other)
        assert read_cached(tmp_path / names[0]) is None and read_cached(tmp_path / other) is None
        swap(tmp_path / names[0], tmp_path / other)


def make_a_pipe(path):
    os.mkfifo(path)


def make_a_folder(path):
    path.mkdir()


BROKEN = {
    "cut off": lambda path: path.write_bytes(b"program"[:3]),
    "empty": Path.touch,
    "a pipe": make_a_pipe,
    "a loop": lambda path: path.symlink_to(path.name),
    "of an earlier release": lambda path: path.write_bytes(b"program without a hash, which is longer than one hash"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_absent_and_replaced(tmp_path, name):
    path = tmp_path / "cache" / "program"
    path.parent.mkdir(mode=0o700)
    BROKEN[name](path)
    assert read_cached(path) is None
    write_cached(path, b"program")
    assert read_cached(path) == b"program"


@pytest.mark.parametrize("make", [make_a_pipe, make_a_folder])
def test_what_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "name")
    with pytest.raises(ValueError, match="is no file"):
        read_regular(tmp_path / "name")
    assert read_cached(tmp_path / "name") is None


def test_deep_json_is_as_wrong_as_any_other():
    assert parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def fails(*arguments):
    raise OSError("no room")
