"""Weighted sums over tokens by the library's kernel, in Triton's interpreter, with TRITON_INTERPRET=1. On GPUs:
tests/gpu/test_bridge.py."""

import pytest
import torch

from ring_attn.recurrence import sums

CASES = [(300, 4, 2, 24, 40), (700, 2, 1, 160, 16), (5, 2, 2, 16, 16)]


@pytest.mark.parametrize(("tokens", "heads", "groups", "rows", "columns"), CASES)
def test_it_is_the_sum(tokens, heads, groups, rows, columns):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, tokens, groups, rows, generator=generator), torch.randn(2, tokens, heads, columns, generator=generator)
    weights = torch.rand(2, heads, tokens, generator=generator)
    of_heads = a.repeat_interleave(heads // groups, 2)
    wanted = torch.einsum("pthm,pthn,pht->phmn", *(x.double() for x in (of_heads, b, weights)))
    torch.testing.assert_close(sums._launched(a, b, weights).double(), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums.weighted_over_tokens(a, b, weights).double(), wanted, rtol=1e-4, atol=1e-3)
