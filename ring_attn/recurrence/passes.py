"""Passes along the pieces of a delta rule by the library's kernels, on operands in the chunks' form, ``[1 or pieces, tokens, heads,
dim]``, contiguous. ``documents``: of pieces in a row."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ring_attn.recurrence.documents import Documents

if TYPE_CHECKING:
    from jax_core.kernels.triton.delta_rule_kernels import DeltaRuleConstants


def maps_along(keys: Tensor, w: Tensor, u: Tensor, decays: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """``M`` and ``E`` of each piece."""
    from jax_core.kernels.triton.delta_rule_kernels import maps_kernel

    const = constants_of(keys, keys, u, decays, documents)
    pieces, tokens = _pieces(keys, documents)
    m, e = (u.new_empty(pieces, const.heads, const.key_dim, dim, dtype=torch.float32) for dim in (const.key_dim, const.value_dim))
    grid = const.value_blocks + const.key_blocks, pieces * const.heads
    bounds = (None,) * 3 if documents is None else (documents.cu_seqlens, documents.first, documents.last)
    maps_kernel[grid](keys, w, u, decays, *bounds, tokens, m, e, const=const, **settings_of(const, keys.dtype))
    return m, e


def back_along(
    queries: Tensor, keys: Tensor, w: Tensor, decays: Tensor, dy: Tensor, dvalues: Tensor, documents: Documents | None
) -> Tensor:
    """The cotangent of the state that enters each piece, of its first document, as far as it comes through the output."""
    from jax_core.kernels.triton.delta_rule_kernels import back_kernel

    const = constants_of(queries, keys, dy, decays, documents)
    pieces, tokens = _pieces(keys, documents)
    dstate = dy.new_empty(pieces, const.heads, const.key_dim, const.value_dim, dtype=torch.float32)
    grid = const.value_blocks, pieces * const.heads
    bounds = (None, None) if documents is None else (documents.cu_seqlens, documents.first)
    numbers = const.key_dim**-0.5, *bounds, tokens
    settings = settings_of(const, keys.dtype)
    back_kernel[grid](queries, keys, w, decays, dy, dvalues, *numbers, dstate, const=const, **settings)
    return dstate


def constants_of(queries: Tensor, keys: Tensor, u: Tensor, decays: Tensor, documents: Documents | None) -> "DeltaRuleConstants":
    from jax_core.kernels.triton.delta_rule_kernels import DeltaRuleConstants

    (heads, value_dim), (key_heads, key_dim) = u.shape[2:], keys.shape[2:]
    columns = 64 if keys.dtype.itemsize == 2 and key_dim <= 128 else 32
    dims = heads, key_heads, queries.shape[2], key_dim, value_dim
    return DeltaRuleConstants(*dims, decays.ndim == 4, documents is not None, columns)


def settings_of(const: "DeltaRuleConstants", dtype: torch.dtype) -> dict[str, int]:
    row = const.key_block * dtype.itemsize  # bytes
    return {"num_warps": 4, "num_stages": 3 if row <= 256 else 2 if row <= 512 else 1}


def _pieces(keys: Tensor, documents: Documents | None) -> tuple[int, int]:
    """Their number and their tokens."""
    if documents is None:
        return keys.shape[0], keys.shape[1]
    return documents.real.shape[0], documents.real.shape[1]
