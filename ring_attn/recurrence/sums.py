"""Sums over tokens of outer products, in float32 (float64 of float64)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jax_core.kernels.triton.constants import padded_dim
from torch_bridge.recurrence.operation import accumulation

if TYPE_CHECKING:
    from jax_core.kernels.triton.sums_kernel import SumsConstants

_PROGRAMS = 264  # that a launch should have: two for each multiprocessor of an H100 or H200
_TOKENS = 64  # of a block
SETTINGS = {"num_warps": 8, "num_stages": 3}  # of a launch


def over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """``[pieces, heads, m, n]`` of ``a [pieces, tokens, heads, m]`` and ``b [..., n]``."""
    # One piece after the other: together, they would be copied.
    return torch.stack([_product(x.permute(1, 2, 0), y.transpose(0, 1)) for x, y in zip(a, b, strict=True)])


def weighted_over_tokens(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """``[pieces, heads, m, n]`` of ``a [pieces, tokens, groups, m]``, ``b [pieces, tokens, heads, n]`` and ``weights [pieces,
    heads, tokens]``. ``a`` and ``b`` are of one dtype, to which what is weighted is rounded."""
    if b.is_cuda and b.dtype.itemsize == 2:  # with one pass of memory less
        return _launched(a.contiguous(), b.contiguous(), weights.contiguous())
    weighted = b * weights.transpose(1, 2).to(b.dtype)[..., None]
    sums = over_tokens(a, weighted.unflatten(2, (a.shape[2], -1)).flatten(3))
    return sums.unflatten(-1, (-1, b.shape[-1])).transpose(2, 3).flatten(1, 2)


def _launched(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    from jax_core.kernels.triton.sums_kernel import sums_kernel

    (pieces, tokens, heads, columns), (groups, rows) = b.shape, a.shape[2:]
    const = constants_of(heads, groups, rows, columns)
    programs = pieces * heads * const.blocks
    parts = max(1, min(_PROGRAMS // programs, tokens // (4 * _TOKENS)))
    part = -(-tokens // (parts * _TOKENS)) * _TOKENS
    parts = -(-tokens // part)
    sums = b.new_empty(parts, pieces, heads, rows, columns, dtype=torch.float32)
    sums_kernel[(pieces * heads, parts, const.blocks)](a, b, weights, sums, tokens, part, const=const, **SETTINGS)
    return sums.sum(0) if parts > 1 else sums[0]


def constants_of(heads: int, groups: int, rows: int, columns: int) -> "SumsConstants":
    from jax_core.kernels.triton.sums_kernel import SumsConstants

    return SumsConstants(heads, groups, rows, columns, min(128, padded_dim(rows)), min(128, padded_dim(columns)), _TOKENS)


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = accumulation(a.dtype)
    if a.dtype == wide:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=wide) if a.is_cuda else torch.bmm(a.to(wide), b.to(wide))
