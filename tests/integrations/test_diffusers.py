"""diffusers' transformers on our ring: refusals here, rings of 2 and 4 in workers/diffusers_worker.py."""

import pytest
import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor
from launch import torchrun
from torch import nn

from ring_attn import Ring
from ring_attn.integrations.diffusers import RING_ATTN, enable_ring_attention, use_ring_attention


@pytest.fixture
def flux():
    sizes = dict(in_channels=4, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8)
    return FluxTransformer2DModel(**sizes, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 8))


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_gives_what_one_process_gives(processes):
    assert "diffusers worker: all right" in torchrun("diffusers_worker.py", processes)


def test_a_ring_of_one_leaves_the_model_as_it_is(flux):
    enable_ring_attention(flux, mesh="local")
    assert flux._parallel_config is None
    assert flux.transformer_blocks[0].attn.processor._attention_backend is None


def test_models_that_would_attend_locally_are_refused(flux):
    processor = flux.transformer_blocks[0].attn.processor
    flux.transformer_blocks[0].attn.processor = AttnProcessor()
    with pytest.raises(NotImplementedError, match=r"transformer_blocks.0.attn has a AttnProcessor"):
        use_ring_attention(flux)
    flux.transformer_blocks[0].attn.processor = processor
    with pytest.raises(ValueError, match="layout='zigzag'"):
        enable_ring_attention(flux, ring=Ring("local", layout="zigzag"))
    flux._cp_plan = None
    with pytest.raises(ValueError, match="no plan for context parallelism"):
        enable_ring_attention(flux, mesh="local")
    with pytest.raises(ValueError, match="no attention module"):
        use_ring_attention(nn.Linear(1, 1))


def test_keys_held_whole_are_attended_to_as_diffusers_does():
    q, k = torch.randn(2, 5, 2, 4), torch.randn(2, 3, 2, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    ours, native = (dispatch_attention_fn(q, k, k, attn_mask=mask, backend=name) for name in (RING_ATTN, "native"))
    assert torch.equal(ours, native)


def test_what_the_ring_cannot_do_is_refused():
    q = torch.randn(1, 4, 4, 4)
    ulysses = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    with pytest.raises(NotImplementedError, match="ulysses_degree=2"):
        dispatch_attention_fn(q, q, q, backend=RING_ATTN, parallel_config=ulysses)
    ring = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        dispatch_attention_fn(q, q[:, :, :2], q[:, :, :2], backend=RING_ATTN, parallel_config=ring)
