"""Passes along the pieces of a delta rule by the library's kernels, on operands in the chunks' form, ``[1 or pieces, tokens, heads,
dim]``, contiguous. ``documents``: of pieces in a row."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jax_core.kernels.triton.constants import padded_dim
from jax_core.request.hardware import capability
from ring_attn.recurrence.documents import Documents

if TYPE_CHECKING:
    from jax_core.kernels.triton.delta_rule_kernels import DeltaRuleConstants

CHUNK = 64  # fla's own: decays are summed along it


def maps_along(keys: Tensor, w: Tensor, u: Tensor, decays: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """``M`` and ``E`` of each piece."""
    from jax_core.kernels.triton.delta_rule_kernels import maps_kernel

    const, settings = parameters_of(keys, keys, u, decays, documents, capability("gpu" if keys.is_cuda else "cpu"))
    pieces, tokens = _pieces(keys, documents)
    m, e = (u.new_empty(pieces, const.heads, const.key_dim, dim, dtype=torch.float32) for dim in (const.key_dim, const.value_dim))
    grid = (pieces * const.heads * const.maps_blocks,)
    bounds = (None,) * 3 if documents is None else (documents.cu_seqlens, documents.first, documents.last)
    maps_kernel[grid](keys, w, u, decays, *bounds, tokens, m, e, const=const, **settings)
    return m, e


def back_along(
    queries: Tensor, keys: Tensor, w: Tensor, decays: Tensor, dy: Tensor, dvalues: Tensor, documents: Documents | None
) -> Tensor:
    """The cotangent of the state that enters each piece, of its first document, as far as it comes through the output."""
    from jax_core.kernels.triton.delta_rule_kernels import back_kernel

    const, settings = parameters_of(queries, keys, dy, decays, documents, capability("gpu" if keys.is_cuda else "cpu"))
    pieces, tokens = _pieces(keys, documents)
    dstate = dy.new_empty(pieces, const.heads, const.key_dim, const.value_dim, dtype=torch.float32)
    grid = (pieces * const.heads * const.value_blocks,)
    bounds = (None, None) if documents is None else (documents.cu_seqlens, documents.first)
    numbers = const.key_dim**-0.5, *bounds, tokens
    back_kernel[grid](queries, keys, w, decays, dy, dvalues, *numbers, dstate, const=const, **settings)
    return dstate


def fits(k: Tensor) -> bool:
    """Keys are at most 512 bytes wide: several chunks of them are to fit into the 99 KiB that the smallest GPUs give a program."""
    return _width(k) <= 512


def _width(k: Tensor) -> int:
    """Of a key, in bytes."""
    return padded_dim(k.shape[3]) * k.dtype.itemsize


def parameters_of(
    queries: Tensor, keys: Tensor, u: Tensor, decays: Tensor, documents: Documents | None, capability: int
) -> tuple["DeltaRuleConstants", dict[str, int]]:
    """The constants, warps and stages of a launch, for a compute capability, as 90 or 120."""
    from jax_core.kernels.triton.delta_rule_kernels import DeltaRuleConstants

    (heads, value_dim), (key_heads, key_dim) = u.shape[2:], keys.shape[2:]
    dims = heads, key_heads, queries.shape[2], key_dim, value_dim
    # With four warps Blackwell may go wrong in such a loop before Triton 3.8 (triton-lang/triton#9871); fla takes two there, too.
    narrow, warps = _width(keys) <= 256, 2 if capability >= 100 else 4
    const = DeltaRuleConstants(*dims, decays.ndim == 4, documents is not None, (16 if narrow else 8) * warps, CHUNK)
    return const, {"num_warps": warps, "num_stages": 2 if narrow else 1}


def _pieces(keys: Tensor, documents: Documents | None) -> tuple[int, int]:
    """Their number and their tokens."""
    if documents is None:
        return keys.shape[0], keys.shape[1]
    return documents.real.shape[0], documents.real.shape[1]
