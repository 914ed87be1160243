"""One rank of the tests of diffusers' transformers on a ring. Run by tests/integrations/test_diffusers.py under torchrun.

The output on every rank, and the gradients of parameters and inputs summed over the ring, must be those of one process. No length
here divides by the ring, except where diffusers' own gathering needs it.
"""

import copy

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ring_attn import sync_gradients
from ring_attn.integrations.diffusers import RING_ATTN, enable_ring_attention, use_ring_attention
from tests.support.healthy import gloo_world


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, name):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=lambda text: f"{name}: {text}")


def wan():
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=16)
    return WanTransformer3DModel(**sizes, num_layers=2, rope_max_seq_len=32)


def flux():
    sizes = dict(in_channels=4, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8)
    return FluxTransformer2DModel(**sizes, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 8))


def of_wan(height=10):
    """3 frames of 5 x 3 patches: 45 positions; and 5 of text, whole on every rank."""
    image, text = noise(1, 4, 3, height, 6, seed=1), noise(1, 5, 8, seed=2)
    return {"hidden_states": image, "encoder_hidden_states": text, "timestep": torch.tensor([3.0])}


def of_flux():
    """13 positions of an image and 7 of text, attended to jointly: on a ring of 2, 11 and 9."""
    ids = {"img_ids": noise(13, 3, seed=3), "txt_ids": noise(7, 3, seed=4)}
    text = {"encoder_hidden_states": noise(2, 7, 8, seed=5), "pooled_projections": noise(2, 8, seed=6)}
    return {"hidden_states": noise(2, 13, 4, seed=7), "timestep": torch.tensor([0.5, 0.1]), **text, **ids}


def run(model, inputs):
    inputs = {name: x.clone().requires_grad_("hidden_states" in name) for name, x in inputs.items()}
    out = model(**inputs, return_dict=False)[0]
    (out * noise(*out.shape, seed=9)).sum().backward()
    return out.detach(), {name: x.grad for name, x in inputs.items() if x.requires_grad}


def check(name, make, inputs, enable):
    torch.manual_seed(0)
    reference = make().double()
    model = copy.deepcopy(reference)
    expected, expected_gradients = run(reference, inputs)
    enable(model)
    out, gradients = run(model, inputs)
    close(out, expected, f"{name}, output")
    sync_gradients(model)
    for label, gradient in gradients.items():
        dist.all_reduce(gradient)
        close(gradient, expected_gradients[label], f"{name}, {label}")
    for (label, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(ours.grad, theirs.grad, f"{name}, {label}")


def as_diffusers_does(model):
    """diffusers' own call, which counts accelerators: a CPU counts as one here."""
    count, torch.accelerator.device_count = torch.accelerator.device_count, lambda: 1
    try:
        use_ring_attention(model)
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=dist.get_world_size()))
    finally:
        torch.accelerator.device_count = count


def check_masks(size, rank):
    """A mask over each rank's own keys, of parts that differ in length, and the masks that are refused."""
    torch.manual_seed(0)
    model = flux().double()
    enable_ring_attention(model)
    config = model.transformer_blocks[0].attn.processor._parallel_config
    x, hidden = noise(2, 4 * size + 1, 2, 4, seed=11), noise(2, 4 * size + 1, seed=12) > 0.5
    heads = x.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=~hidden[:, None, None])
    part, mask = (whole.tensor_split(size, 1)[rank] for whole in (x, ~hidden))
    for given in (mask, mask[:, None, None]):
        out = dispatch_attention_fn(part, part, part, attn_mask=given, backend=RING_ATTN, parallel_config=config)
        close(out, expected.transpose(1, 2).tensor_split(size, 1)[rank], "mask")
    square = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool)
    for options, words in [
        ({"attn_mask": mask.double()}, "must be bool over this rank's keys"),
        ({"attn_mask": square[None, None]}, "must be bool over this rank's keys"),
        ({"is_causal": True}, "causal has no meaning"),
    ]:
        try:
            dispatch_attention_fn(part, part, part, **options, backend=RING_ATTN, parallel_config=config)
        except NotImplementedError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{words}: not refused")


def main():
    with gloo_world("diffusers") as (rank, size):
        check("wan", wan, of_wan(), enable_ring_attention)
        check("flux", flux, of_flux(), enable_ring_attention)
        if size == 2:
            check("as diffusers does", wan, of_wan(height=8), as_diffusers_does)
        check_masks(size, rank)


if __name__ == "__main__":
    main()
