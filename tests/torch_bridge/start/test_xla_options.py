"""XLA's options for a ring: the library's, but for those that the user has set."""

import jax
import pytest

from torch_bridge.backends.compiled import _on_ring
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.start.xla_options import NO_CAPTURE, NO_TRIALS_OF_FUSIONS, ONE_ROTATION, TWO_AXES, options_of_ring


@pytest.mark.parametrize("axes", [1, 2])
def test_a_ring_over_two_axes_has_a_rotation_under_way_on_each(axes):
    options = options_of_ring(axes)
    assert options.items() >= (ONE_ROTATION | NO_TRIALS_OF_FUSIONS | NO_CAPTURE).items()
    assert (options.items() >= TWO_AXES.items()) == (axes == 2)


def test_options_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=true --xla_gpu_autotune_level=0")
    options = options_of_ring(1)
    assert "xla_gpu_shard_autotuning" not in options and options.items() >= ONE_ROTATION.items()


def test_calls_of_one_process_are_not_captured_either(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "jit", lambda function, **settings: asked.append(settings))
    _on_ring(ProcessRing((0,), 0), "gpu", True, lambda x: (x,), 1, ())
    assert [settings["compiler_options"].items() >= NO_CAPTURE.items() for settings in asked] == [True]
