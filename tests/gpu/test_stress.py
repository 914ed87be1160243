"""Allocators and streams under stress, on one GPU and on a ring of all (``stress_worker.py``)."""

import pytest

from tests.gpu.jobs import RANKS, need, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("results", ["in_place", "copied"])
@pytest.mark.parametrize("together", [False, True], ids=["one GPU", "all GPUs"])
def test_stress(together, results):
    need(2 if together else 1)
    fine, said = torchrun(RANKS if together else 1, "tests/gpu/stress_worker.py", "--results", results, timeout=580)
    assert fine and f"results {results}: 0 differ from the quiet run" in said, said
    print(said)
