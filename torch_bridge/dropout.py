"""Dropout's pattern, for weights that torch computes beside the ring."""

from collections.abc import Sequence
from functools import partial

import jax
import torch

from jax_core.masks import dropout
from torch_bridge.road import road_of

_keep_mask = partial(jax.jit, static_argnums=5)(dropout.keep_mask)


@torch.compiler.disable
def keep_mask(
    seed: int, batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, k_index: torch.Tensor, prob: float
) -> torch.Tensor:
    """:func:`jax_core.masks.dropout.keep_mask` of integer tensors that broadcast; bool, on their device."""
    return road_of(batch.device).keep_mask(seed, batch, head, q_index, k_index, prob=prob)


def jitted_keep_mask(seed: int, indices: Sequence[jax.Array], prob: float) -> jax.Array:
    batch, head, q_index, k_index = indices
    return _keep_mask(dropout.seed_words(seed), batch, head, q_index, k_index, prob)
