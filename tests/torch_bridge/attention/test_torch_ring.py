"""ring_attn.ring_attention over rings of real processes, forward and every gradient, in float64."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow


@pytest.mark.costly
def test_every_feature_on_a_ring_of_two():
    printed = torchrun("attention_worker.py", 2, "cpu", "1")
    assert printed.count("ok ") == 9, printed


def test_ring_of_four():
    printed = torchrun("attention_worker.py", 4, "cpu", "1", "float64", "causal")
    assert printed.count("ok causal") == 3, printed


def test_rings_of_a_2d_mesh_with_different_shapes():
    printed = torchrun("attention_worker.py", 4, "cpu", "2", "float64", "chunk, segments, slopes")
    assert printed.count("ok ") == 1, printed


def test_gradients_of_rings_of_one_are_not_summed_over_the_others():
    printed = torchrun("attention_worker.py", 2, "cpu", "2", "float64", "window, sinks, bias")
    assert printed.count("ok ") == 1, printed


def test_ranks_that_disagree_are_told():
    printed = torchrun("disagreement_worker.py", 2)
    assert printed.count("refused") == 14 and printed.count("and works") == 2, printed


def test_a_ring_over_two_dimensions_of_a_mesh():
    printed = torchrun("several_dims_worker.py", 4)
    assert printed.count("ok ") == 4, printed
