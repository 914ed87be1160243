"""torchtitan's trainer with its debug Llama 3 on a ring, against one process with torchtitan's own masks."""

import pytest
import torch
from launch import torchrun

pytestmark = pytest.mark.slow

STEPS = {"dp 2 x cp 2": 10, "cp 4": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Loss and gradient norm of the steps of each run."""
    folder = tmp_path_factory.mktemp("torchtitan")
    whole, rings = str(folder / "whole.pt"), str(folder / "rings.pt")
    torchrun("torchtitan_worker.py", 1, whole, "one process")
    torchrun("torchtitan_worker.py", 4, rings, *STEPS)
    return torch.load(whole) | torch.load(rings)


@pytest.mark.costly
@pytest.mark.parametrize("name", STEPS)
def test_its_steps_are_those_of_one_process(runs, name):
    expected, found = (torch.tensor(runs[each], dtype=torch.float64) for each in ("one process", name))
    assert len(found) == STEPS[name] and expected[-1, 0] < expected[0, 0] - 1
    expected = expected[: STEPS[name]]
    if name == "cp 4":
        found[:, 0] /= 4  # the full_dtensor backend adds up a loss that is global already, with a ring or without
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[:, 1], expected[:, 1], rtol=1e-4, atol=0)


def settled(**parallelism):
    """The settings of a trainer, read by a converted model config."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from ring_attn.integrations.torchtitan import RingAttentionConverter

    config = llama3_debugmodel()
    config.training.disable_cuda_graphs = parallelism.pop("disable_cuda_graphs", True)
    config.parallelism = ParallelismConfig(context_parallel_degree=2, **parallelism)
    config.model_spec = model_registry("debugmodel", converters=[RingAttentionConverter.Config()])
    config.model_spec.model.update_from_config(config=config)
    return config.model_spec.model.layers[0].attention.inner_attention


def test_the_layout_is_that_of_the_load_balancer():
    assert settled().layout == "zigzag"
    assert settled(context_parallel_load_balancer=None).layout == "contiguous"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (dict(context_parallel_load_balancer="ptrr"), "must be 'headtail' or None"),
        (dict(spmd_backend="partial_dtensor"), "spmd_backend must be one of"),
        (dict(disable_cuda_graphs=False), "set training.disable_cuda_graphs"),
    ],
)
def test_settings_that_do_not_go_with_a_ring_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        settled(**setting)


def test_attention_that_cannot_be_converted_is_refused():
    from torchtitan.models.deepseek_v3 import model_registry

    from ring_attn.integrations.torchtitan import RingAttentionConverter

    with pytest.raises(NotImplementedError, match="only torchtitan's GQAttention has a ring so far"):
        model_registry("debugmodel", converters=[RingAttentionConverter.Config()])


def test_windows_of_varlen_attention_are_kept():
    from torchtitan.models.common.attention import VarlenAttention

    from ring_attn.integrations.torchtitan import _window

    assert _window(VarlenAttention.Config(window_size=(7, 0))) == 7
    assert _window(VarlenAttention.Config()) is None
    with pytest.raises(NotImplementedError, match="only causal attention"):
        _window(VarlenAttention.Config(window_size=(-1, -1)))
