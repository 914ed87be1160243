"""XLA's options for a ring: the library's, but for those that the user has set."""

import pytest

from torch_bridge.start.xla_options import FEW_CHANNELS, TWO_AXES, options_of_ring


@pytest.mark.parametrize("axes", [1, 2])
def test_a_ring_over_two_axes_has_a_rotation_under_way_on_each(axes):
    options = options_of_ring(axes)
    assert options.items() >= FEW_CHANNELS.items()
    assert (options.items() >= TWO_AXES.items()) == (axes == 2)


def test_options_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_nccl_p2p_max_nchannels=24 --xla_gpu_autotune_level=0")
    options = options_of_ring(1)
    assert "xla_gpu_nccl_p2p_max_nchannels" not in options and "xla_gpu_nccl_collective_max_nchannels" in options
