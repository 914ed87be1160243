"""The programs of tests/gpu without a GPU, at a small size: that they start, compare and come to an end."""

import re
from pathlib import Path

import pytest

from tests.gpu.jobs import run, torchrun

pytestmark = pytest.mark.slow

SMALL = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

HANGS = """
import os, time
def stuck():
    print("rank", os.environ["RANK"], "of", os.getpid(), flush=True)
    time.sleep(600)
stuck()
"""


def test_a_job_that_does_not_end_says_where_and_leaves_nobody(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    fine, said = torchrun(2, str(tmp_path / "hangs.py"), timeout=30, **SMALL)
    assert not fine and said.endswith("not done after 30 s"), said
    assert said.count('hangs.py", line 5 in stuck') == 2, said
    of_ranks = re.findall(r"rank \d of (\d+)", said)
    assert len(of_ranks) == 2 and not any(runs(number) for number in of_ranks), said


def runs(process):
    """Also where nobody has asked yet how it ended."""
    told = Path("/proc", process, "cmdline")
    return told.exists() and told.read_bytes() != b""


def test_beside_torch():
    fine, said = run("tests/gpu/full_memory_worker.py", **SMALL)
    assert fine and "after 512 tokens\nall right" in said, said


def test_stress():
    fine, said = torchrun(2, "tests/gpu/stress_worker.py", "--iterations", "30", **SMALL)
    assert fine and "30 iterations on 2 process(es), results in_place: 0 differ from the quiet run" in said, said


@pytest.mark.costly
def test_kernels_for_16_bits():
    cases = ("--cases", "zigzag", "documents", "--strategies", "ring", "all_gather", "--platforms", "xla", "cute")
    fine, said = torchrun(2, "tests/gpu/sixteen_bits_worker.py", *cases, **SMALL)
    assert fine and said.count(" dv ") == 4 and said.count("refused: ") == 4 and "WRONG" not in said, said
