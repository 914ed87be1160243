"""What composes with a ring over gloo ranks, against one process: data, tensor and pipeline parallelism, checkpoints, offload."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow

WORKER = "parallelism_worker.py"
STRICT = {"RING_ATTN_STRICT": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # many small programs, each run once


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What the four ranks printed, and the folder with the checkpoint that they saved."""
    folder = tmp_path_factory.mktemp("parallelism") / "checkpoint"
    return torchrun(WORKER, 4, str(folder), **STRICT), str(folder)


def test_parallelism_beside_a_ring_on_four_ranks(four_ranks):
    printed, _ = four_ranks
    assert printed.count("ok ") == 10, printed


def test_checkpoints_scaling_and_offload_on_two_ranks(four_ranks):
    _, folder = four_ranks
    printed = torchrun(WORKER, 2, folder, **STRICT)
    assert printed.count("ok ") == 6, printed
