"""The programs of tests/gpu without a GPU, at a small size: that they start, compare and come to an end."""

import pytest

from tests.gpu.jobs import run, torchrun

pytestmark = pytest.mark.slow

SMALL = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


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
