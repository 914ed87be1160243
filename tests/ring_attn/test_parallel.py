"""Heads split over one dimension of a mesh, the sequence over another."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow


@pytest.mark.costly
def test_heads_and_ring_give_what_one_process_gives():
    printed = torchrun("parallel_worker.py", 4)
    assert printed.count("ok ") == 6, printed
