"""What composes with a ring over gloo ranks, against one process: data, tensor and pipeline parallelism, checkpoints, offload."""

import pytest
from launch import torchrun
from torch.distributed.pipelining import PipelineStage

from torch_bridge.backends.capture import shapes_only

pytestmark = pytest.mark.slow

WORKER = "parallelism_worker.py"
STRICT = {"PYTHONWARNINGS": "error::RuntimeWarning"}  # DoubtWarning, which cannot be named before it is imported, is one


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


def test_a_stage_that_is_run_for_its_shapes_is_no_mistake():
    """Its inputs are uninitialised memory, which may be equal on all ranks."""

    def _forward_metadata_inference():
        return shapes_only()

    assert _forward_metadata_inference() and not shapes_only()
    # torch before 2.13 has zeros there, which are no mistake either: they are the same at all positions.
    assert hasattr(PipelineStage, _forward_metadata_inference.__name__) or hasattr(PipelineStage, "_shape_inference")
