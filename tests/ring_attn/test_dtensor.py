"""ring_attention of DTensors, on four processes."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow


@pytest.mark.costly
def test_dtensors_give_what_whole_tensors_give():
    printed = torchrun("dtensor_worker.py", 4)
    assert printed.count("ok ") == 8, printed
