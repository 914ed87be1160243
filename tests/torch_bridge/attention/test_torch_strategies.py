"""Every way to split a sequence, from torch, over rings of real processes: the oracle's results and gradients, in float64."""

from pathlib import Path

import pytest
from launch import torchrun
from strategy_cases import write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cases") / "cases.pt"
    write(file)
    return file


def check(cases: Path, processes: int, shape: str, *runs: str) -> None:
    printed = torchrun("strategies_worker.py", processes, str(cases), "cpu", "float64", shape, *runs)
    assert printed.count("ok ") >= len(runs) and all(f"ok {run}\n" in printed for run in runs), printed


def test_on_two_ranks(cases):
    check(cases, 2, "2", "all_gather:documents:zigzag:a", "ulysses:window:striped:a")


@pytest.mark.costly
def test_on_four_ranks_with_two_heads_of_keys(cases):
    runs = (
        "ulysses:documents:zigzag:ab",
        "ulysses_ring:documents:striped:ab",
        "ring_ulysses:window:zigzag:ba",
        "hierarchical:window:zigzag:ab",
    )
    check(cases, 4, "2x2", *runs)


def test_two_rings_of_four_that_make_different_calls(cases):
    check(cases, 8, "2x2", "ring:documents:zigzag:ab", "ulysses_ring:window:contiguous:ba")
