"""Memory that torch and JAX share on GPUs: under a device that is far behind (``memory_worker.py``, on rings of one and two), and
where torch fills the GPU (``full_memory_worker.py``)."""

from functools import cache

import pytest

from tests.gpu.jobs import GPUS, need, run, torchrun
from tests.gpu.memory_worker import CHECKS, left_out

pytestmark = pytest.mark.gpu


def checks(size: int, *names: str, **variables: str) -> tuple[bool, str]:
    """Whether the worker reached its end, and what it said."""
    fine, said = torchrun(size, "tests/gpu/memory_worker.py", *names, **variables)
    return fine and "the end" in said, said


@cache
def all_checks(size: int) -> tuple[bool, str]:
    return checks(size)


@pytest.mark.parametrize("size", [1, 2])
def test_the_end_of_the_interpreter(size):
    need(size)
    ended, said = all_checks(size)
    assert ended, said


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [1, 2])
def test_memory(size, check):
    need(size)
    if check in (unfit := left_out(size, GPUS)):
        pytest.skip(unfit[check])
    said = all_checks(size)[1]
    assert all(f"rank {rank}: {check}: ok" in said for rank in range(size)), said


@pytest.mark.parametrize("check", ["held", "storm"])
def test_with_expandable_segments(check):
    ended, said = checks(1, check, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert ended, said


def test_with_the_pool_of_xla():
    """JAX's own default, which a user may have chosen."""
    ended, said = checks(1, "storm", XLA_PYTHON_CLIENT_ALLOCATOR="bfc", PYTHONWARNINGS="ignore")
    assert ended, said


def test_beside_a_torch_that_fills_the_gpu():
    fine, said = run("tests/gpu/full_memory_worker.py")
    assert fine and "all right" in said, said
    print(said)
