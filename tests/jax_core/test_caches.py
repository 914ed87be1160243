from pathlib import Path

import pytest

from jax_core.caches import VARIABLE, cache_folder, write_whole


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")


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


def fails(*arguments):
    raise OSError("no room")
