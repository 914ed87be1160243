"""Under torch.autocast the function does what torch's own attention does: dtypes, errors, and gradients in the inputs' dtypes."""

import pytest
import torch
import torch.nn.functional as F

from ring_attn import RingAttention, ring_attention

HALVES = [torch.bfloat16, torch.float16]


def qkv(*dtypes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 6, 8, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


def ours(q, k, v, **options):
    return ring_attention(q, k, v, qkv_format="bhsd", mesh="local", **options)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float16, torch.float32, torch.bfloat16)],
    ids=str,
)
def test_dtypes_and_values_are_those_of_sdpa(half, dtypes):
    inputs, bias = qkv(*dtypes), torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", half):
        out, expected = ours(*inputs, bias=bias), F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    assert out.dtype == expected.dtype == half
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    found, wanted = (torch.autograd.grad(x.float().sin().sum(), inputs) for x in (out, expected))
    assert tuple(x.dtype for x in found) == dtypes
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_what_autocast_leaves_alone():
    wide, single = qkv(*[torch.float64] * 3), qkv(*[torch.float32] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*wide).dtype == F.scaled_dot_product_attention(*wide).dtype == torch.float64
        with pytest.raises(ValueError, match="float64"):
            ours(single[0], *wide[1:])
        with torch.autocast("cpu", enabled=False):
            assert ours(*single).dtype == torch.float32
    with pytest.raises(ValueError, match="share a dtype"):
        ours(*qkv(torch.bfloat16, torch.bfloat16, torch.float32))


def test_float32_sinks_beside_it_have_their_gradient():
    inputs, sinks = qkv(*[torch.float32] * 3), torch.zeros(4, requires_grad=True)
    exact = torch.autograd.grad(ours(*inputs, sinks=sinks).sum(), sinks)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*inputs, sinks=sinks)
    (found,) = torch.autograd.grad(out.float().sum(), sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, *exact, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_module_under_autocast():
    torch._dynamo.reset()
    module, x = RingAttention(16, 4, batch_first=True, sinks=True, add_bias_kv=True, mesh="local"), torch.randn(2, 6, 16)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(x, x, x)[0]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, module(x, x, x)[0])
    assert compiled(x, x, x)[0].dtype == torch.float32
