"""Sums over tokens of outer products, in float32 (float64 of float64)."""

import torch
from torch import Tensor

from torch_bridge.recurrence.operation import accumulation


def over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """``[pieces, heads, m, n]`` of ``a [pieces, tokens, heads, m]`` and ``b [..., n]``."""
    # One piece after the other: together, they would be copied.
    return torch.stack([_product(x.permute(1, 2, 0), y.transpose(0, 1)) for x, y in zip(a, b, strict=True)])


def weighted_over_tokens(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """``[pieces, heads, m, n]`` of ``a [pieces, tokens, groups, m]``, ``b [pieces, tokens, heads, n]`` and ``weights [pieces,
    heads, tokens]``. ``a`` and ``b`` are of one dtype, to which what is weighted is rounded."""
    weighted = b * weights.transpose(1, 2).to(b.dtype)[..., None]
    sums = over_tokens(a, weighted.unflatten(2, (a.shape[2], -1)).flatten(3))
    return sums.unflatten(-1, (-1, b.shape[-1])).transpose(2, 3).flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = accumulation(a.dtype)
    if a.dtype == wide:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=wide) if a.is_cuda else torch.bmm(a.to(wide), b.to(wide))
