"""Programs on disk: who finds them, and that nobody is harmed by what is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import torchrun

WORKER = Path(__file__).parents[2] / "support" / "workers" / "kept_programs.py"


def start(what, folder, **environment):
    environment = {**os.environ, "RING_ATTN_CACHE": str(folder), **environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen([sys.executable, WORKER, what], env=environment, stdout=subprocess.PIPE, text=True)


def told(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def run(what, folder, **environment):
    return told(start(what, folder, **environment))


def programs(folder):
    return sorted(path.name for path in Path(folder).rglob("*-program"))


@pytest.mark.slow
def test_a_second_job_compiles_nothing(tmp_path):
    first, second = (run("attention", tmp_path) for _ in range(2))
    assert first["compiled"] >= 2 and first["found"] == 0  # the forward and the backward
    assert second["compiled"] == 0 and second["found"] == first["compiled"]
    assert second["results"] == first["results"]
    assert first["cache"] == "WholeFiles" and not first["warnings"] + second["warnings"]


def test_several_write_at_once(tmp_path):
    jobs = [start("sine", tmp_path) for _ in range(3)]
    assert len({tuple(told(job)["results"]) for job in jobs}) == 1
    assert programs(tmp_path) and not list(tmp_path.rglob(".*"))  # no file is left half written
    assert run("sine", tmp_path)["compiled"] == 0


def test_it_can_be_turned_off():
    told = run("sine", "off")
    assert told["folder"] is None and told["found"] == told["compiled"] == 0 and told["least"] == 1.0


def test_the_users_own_cache_stays(tmp_path):
    told = run("sine", tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert told["folder"] == str(tmp_path / "theirs") and told["least"] == 1.0 and told["cache"] != "WholeFiles"
    assert not (tmp_path / "ours").exists()


def test_the_users_limits_stay(tmp_path):
    pytest.importorskip("filelock", reason="JAX limits the size of its cache with it; torch brings it")
    told = run("sine", tmp_path, JAX_COMPILATION_CACHE_MAX_SIZE="1000000", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="50")
    assert told["folder"].startswith(str(tmp_path)) and told["least"] == 50 and told["cache"] != "WholeFiles"
    assert not programs(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    told = run("sine", tmp_path / "file")
    assert any(str(tmp_path / "file") in text and "RING_ATTN_CACHE" in text for text in told["warnings"])
    assert told["folder"] is None


def test_a_broken_file_is_compiled_again_and_replaced(tmp_path):
    whole = run("sine", tmp_path)
    (path,) = (path for path in tmp_path.rglob("jit__lambda*-program"))
    content = path.read_bytes()
    path.write_bytes(content[:100])
    told = run("sine", tmp_path)
    assert told["results"] == whole["results"] and told["compiled"] == 1 and not told["warnings"]
    assert run("sine", tmp_path)["compiled"] == 0


def test_programs_whose_files_were_swapped_are_compiled_again(tmp_path):
    whole = run("sums", tmp_path)
    first, second = (path for path in tmp_path.rglob("jit_plus_*-program"))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    told = run("sums", tmp_path)
    assert told["results"] == whole["results"] == [1.0, 12.0] and told["compiled"] == 2 and not told["warnings"]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    told = run("sine", tmp_path / "open")
    assert told["folder"] is None and not list((tmp_path / "open").iterdir())
    assert len(told["warnings"]) == 1 and "others may write to it" in told["warnings"][0]


def test_of_two_ranks_one_compiles(tmp_path):
    """Each program, whichever of the two is first; and in a second job, where each reads it, the results are the same."""
    first, second = (torchrun("programs_of_ranks.py", 2, RING_ATTN_PROGRAMS_OF_TESTS=str(tmp_path)) for _ in range(2))
    found = re.findall(r"found (\d+)", first)
    kinds = [name.partition("-")[0] for name in programs(tmp_path)]
    assert kinds.count("jit_forward") == kinds.count("jit_backward") == 1
    assert sum(map(int, found)) >= 2
    assert re.findall(r"compiled (\d+)", second) == ["0", "0"]
    assert len(re.findall("gradients .*", first)) == 2
    assert re.findall("gradients .*", first) == re.findall("gradients .*", second)
