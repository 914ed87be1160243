"""The dropout pattern, for attention weights that torch computes outside the ring."""

from collections.abc import Sequence
from functools import partial

import jax

from jax_core.masks import dropout

_keep_mask = partial(jax.jit, static_argnums=5)(dropout.keep_mask)


def jitted_keep_mask(seed: int, indices: Sequence[jax.Array], prob: float) -> jax.Array:
    """:func:`jax_core.masks.dropout.keep_mask` for broadcastable integer arrays (batch, head, query, key)."""
    batch, head, q_index, k_index = indices
    return _keep_mask(dropout.seed_words(seed), batch, head, q_index, k_index, prob)
