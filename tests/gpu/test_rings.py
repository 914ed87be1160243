"""Rings of all ranks that there are: every feature, every strategy, and the kernels for 16 bits, in processes of their own."""

import re
from itertools import product
from pathlib import Path

import pytest

from benchmarks.ring.systems import OF_TWO_AXES, STRATEGIES
from jax_core.kernels.cute import calls as cute
from jax_core.request.hardware import capability
from tests.gpu.jobs import RANKS, need, run, torchrun
from tests.gpu.sixteen_bits_worker import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

WORKERS = "tests/support/workers"
EVEN = RANKS - RANKS % 2
OF_WORKERS = {"timeout": 880, "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_feature_over_a_ring(dtype):
    """Forward and all gradients, in float64 (the xla kernel) and float32 (Triton's), against the whole sequence in float64."""
    need(2)
    fine, said = torchrun(RANKS, f"{WORKERS}/attention_worker.py", "cuda", "1", dtype, **OF_WORKERS)
    assert fine, said


def test_every_feature_over_several_rings():
    need(4)
    fine, said = torchrun(EVEN, f"{WORKERS}/attention_worker.py", "cuda", str(EVEN // 2), "float32", **OF_WORKERS)
    assert fine, said


def test_of_two_ranks_one_compiles(tmp_path):
    """The forward and the backward, while the other waits and reads them; a second job none, with the same gradients."""
    need(2)
    worker, of_job = f"{WORKERS}/programs_of_ranks.py", {**OF_WORKERS, "RING_ATTN_CACHE": str(tmp_path)}
    (fine, first), (fine_again, second) = (torchrun(2, worker, "cuda", **of_job) for _ in range(2))
    assert fine and fine_again, first + second
    assert sum(map(int, re.findall(r"found (\d+)", first))) >= 2, first
    assert re.findall(r"compiled (\d+)", second) == ["0", "0"], second
    assert len(set(re.findall("gradients .*", first + second))) == 2, first + second


@pytest.mark.parametrize("gpus", [1, 2])
def test_decoding_by_torchs_launches(gpus):
    need(gpus)
    fine, said = torchrun(gpus, "tests/gpu/decoding_worker.py", **OF_WORKERS)
    assert fine, said


def test_layers_with_a_state():
    """Each operator in float64, all gradients, against one GPU, which has the oracle's by the tests on CPUs."""
    need(2)
    fine, said = torchrun(RANKS, f"{WORKERS}/states_worker.py", "cuda", **OF_WORKERS)
    assert fine, said


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The oracle's results, which a CPU computes in float64."""
    need(2)
    file: Path = tmp_path_factory.mktemp("cases") / "cases.pt"
    fine, said = run("tests/support/strategy_cases.py", str(file), JAX_PLATFORMS="cpu")
    assert fine, said
    return str(file)


def check_strategies(cases: str, dtype: str, *names: str) -> None:
    shape, both = (f"2x{EVEN // 2}", "ab") if EVEN > 2 else ("2", "a")
    runs = [f"{name}:{case}:zigzag:{both}" for name, case in product(names, ("documents", "window"))]
    fine, said = torchrun(EVEN, f"{WORKERS}/strategies_worker.py", cases, "cuda", dtype, shape, *runs, **OF_WORKERS)
    assert fine and all(f"ok {run}\n" in said for run in runs), said


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
def test_strategies(cases, strategy, dtype):
    need(2)
    check_strategies(cases, dtype, strategy)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strategy", ["ulysses_ring", "ring_ulysses"])
def test_strategies_of_two_axes(cases, strategy, dtype):
    need(4)
    check_strategies(cases, dtype, strategy)


def test_a_device_that_does_not_finish_a_call_is_told():
    need(2)
    fine, said = torchrun(RANKS, "tests/gpu/stalled_worker.py", timeout=120)
    assert not fine and "nobody was told" not in said, said
    assert all(f"rank {rank}: eight slow calls have ended" in said for rank in range(RANKS)), said
    assert "has not finished call" in said and "Every rank of the ring has given this call to its device, or is about to" in said, (
        said
    )
    print(said)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_for_16_bits(strategy, half):
    """cuDNN's is not among them: it has no gradient of the LSE, which is compared."""
    need(4 if strategy in OF_TWO_AXES else 2)
    if reason := cute.missing("gpu", capability("gpu")):
        pytest.skip(f"flash-attn-4: {reason}")
    arguments = ("--strategies", strategy, "--cases", *list(CASES)[half::2])
    fine, said = torchrun(EVEN, "tests/gpu/sixteen_bits_worker.py", *arguments, timeout=880)
    assert fine and "out " in said, said
    print(said)
