"""The seed of dropout as an operand, and its pattern for attention weights that torch computes outside the ring."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import jax


def words_of_seed(seed: int, device: torch.device | str) -> torch.Tensor:
    """The 64-bit seed as two int32 words, low word first, written on ``device``."""
    low = (seed + 2**31) % 2**32 - 2**31
    high = (seed // 2**32 + 2**31) % 2**32 - 2**31
    words = torch.full((2,), low, dtype=torch.int32, device=device)
    words[1:] = high  # no view of one int64: compiled by torch 2.11 that gives the low word twice
    return words


def keep_mask(seed: int, indices: "Sequence[jax.Array]", prob: float) -> "jax.Array":
    """:func:`jax_core.masks.dropout.keep_mask` for broadcastable integer arrays (batch, head, query, key)."""
    from jax_core.masks.dropout import seed_words

    return _jitted()(seed_words(seed), *indices, prob)


@cache
def _jitted() -> "Callable[..., jax.Array]":
    import jax

    from jax_core.masks.dropout import keep_mask

    return partial(jax.jit, static_argnums=5)(keep_mask)
