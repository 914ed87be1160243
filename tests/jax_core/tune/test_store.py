"""A table's file: whole, merged, and never trusted."""

import json
import multiprocessing
import os
import threading
import warnings
from pathlib import Path

import pytest
from tuning import BACKWARD, found

from jax_core.tune import store
from jax_core.tune.devices import file_name
from jax_core.tune.lookup import SHIPPED
from jax_core.tune.table import SCHEMA, from_json, joined, to_json

DEVICE = "a device"
TABLE = {"a key": {"forward": found(), "backward": found(BACKWARD, heuristic_ms=None, complete=False)}}


def test_a_table_survives_its_file(tmp_path):
    path = tmp_path / "folder" / "table.json"
    assert store.read(path, DEVICE) == {}
    assert store.merge(path, DEVICE, TABLE)
    assert store.read(path, DEVICE) == TABLE


def test_what_is_found_again_replaces_a_pass_and_nothing_else():
    again = {"a key": {"forward": found(ms=0.5)}, "another": {"forward": found()}}
    both = joined(TABLE, again)
    assert both["a key"] == {"forward": found(ms=0.5), "backward": TABLE["a key"]["backward"]}
    assert both["another"] == again["another"]


def test_the_gain_is_a_part_of_the_heuristics_time():
    assert found(ms=1.5, heuristic_ms=2.0).gain == pytest.approx(25)
    assert found(heuristic_ms=None).gain is None


def changed(**changes) -> str:
    return json.dumps(json.loads(to_json(TABLE, DEVICE)) | changes)


def with_entry(**changes) -> str:
    data = json.loads(to_json(TABLE, DEVICE))
    data["configurations"]["a key"]["forward"] |= changes
    return json.dumps(data)


BROKEN = {
    "empty": "",
    "cut off": to_json(TABLE, DEVICE)[:-40],
    "not JSON": "import os",
    "deep": "[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
    "a list": "[]",
    "of another program": '{"version": 3}',
    "of an older schema": changed(schema=SCHEMA - 1),
    "of another device": changed(device="another"),
    "an entry of text": changed(configurations={"a key": "fast"}),
    "another pass": changed(configurations={"a key": {"sideways": {}}}),
    "a size of 0": with_entry(params={"q_blocksize": 0}),
    "a size of text": with_entry(params={"q_blocksize": "__import__('os')"}),
    "an unknown number": with_entry(params={"blocks": 3}),
    "an unknown field": with_entry(more=1),
    "no time": with_entry(ms=float("nan")),
    "a version that is no text": with_entry(versions={"jax": 1}),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("reading", [True, False])
def test_a_file_that_is_none_is_set_aside_with_one_warning(tmp_path, name: str, reading: bool):
    path, content = tmp_path / "table.json", BROKEN[name]
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="was set aside as") as warned:
        assert store.read(path, DEVICE) == {} if reading else store.merge(path, DEVICE, TABLE)
    assert len(warned) == 1
    (aside,) = tmp_path.glob("table.json.aside-*")
    assert aside.read_bytes() == content
    assert store.read(path, DEVICE) == ({} if reading else TABLE)


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_set_aside(tmp_path, make, reading: bool):
    path = tmp_path / "table.json"
    make(path)
    with pytest.warns(RuntimeWarning, match="was set aside as .* is no file") as warned:
        assert store.read(path, DEVICE) == {} if reading else store.merge(path, DEVICE, TABLE)
    assert len(warned) == 1
    assert store.read(path, DEVICE) == ({} if reading else TABLE)


def test_a_pipe_in_place_of_the_lock_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / ".table.json.lock")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert not store.merge(tmp_path / "table.json", DEVICE, TABLE)


def test_a_later_releases_file_is_neither_read_nor_written(tmp_path):
    path, later = tmp_path / "table.json", changed(schema=SCHEMA + 1, more="than this release knows")
    path.write_text(later)
    with pytest.warns(RuntimeWarning, match="a later release wrote it"):
        assert store.read(path, DEVICE) == {}
    with pytest.warns(RuntimeWarning, match="a later release wrote it"):
        assert not store.merge(path, DEVICE, TABLE)
    assert path.read_text() == later


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be kept in .* RING_ATTN_CACHE") as warned:
        assert not store.merge(tmp_path / "file" / "table.json", DEVICE, TABLE)
    assert len(warned) == 1


def test_without_locks_a_warning_says_what_may_be_lost(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="one may lose its own"):
        assert store.merge(tmp_path / "table.json", DEVICE, TABLE)
    assert store.read(tmp_path / "table.json", DEVICE) == TABLE


def write_some(path: Path, writer: int, count: int) -> None:
    for number in range(count):
        assert store.merge(path, DEVICE, {f"{writer} {number}": {"forward": found()}})


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path, writers, count = tmp_path / "table.json", 4, 25
    fork = multiprocessing.get_context("fork")  # JAX has not started in this process's threads: only files are touched
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's and JAX's warnings about forks of processes with threads
        processes = [fork.Process(target=write_some, args=(path, writer, count)) for writer in range(writers)]
        for process in processes:
            process.start()
    ended = threading.Event()
    broken: list[Exception] = []

    def read_all_the_while():
        while not ended.is_set():
            try:
                path.exists() and from_json(path.read_text(), DEVICE)
            except ValueError as error:
                broken.append(error)

    reader = threading.Thread(target=read_all_the_while)
    reader.start()
    for process in processes:
        process.join(60)
    ended.set()
    reader.join()
    assert [process.exitcode for process in processes] == [0] * writers
    assert broken == []
    assert store.read(path, DEVICE).keys() == {f"{writer} {number}" for writer in range(writers) for number in range(count)}
    assert {left.name for left in tmp_path.iterdir()} == {"table.json", ".table.json.lock"}


def test_what_is_shipped_are_tables():
    for path in SHIPPED.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        table = from_json(path.read_text(), device)
        assert path.name == file_name(device)
        assert all(entry.gain is None or entry.gain >= 0 for passes in table.values() for entry in passes.values())
