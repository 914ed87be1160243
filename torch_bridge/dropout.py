"""Dropout's pattern as torch tensors, for weights that torch computes beside the ring."""

from functools import partial

import jax
import torch

from jax_core.masks import dropout
from torch_bridge.dlpack import narrow_ids, to_jax, to_torch

_keep_mask = partial(jax.jit, static_argnums=5)(dropout.keep_mask)


@torch.compiler.disable
def keep_mask(
    seed: int, batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, k_index: torch.Tensor, prob: float
) -> torch.Tensor:
    """:func:`jax_core.masks.dropout.keep_mask` of integer tensors that broadcast; bool, on their device."""
    if batch.device.type == "xla":
        from torch_bridge import torch_xla as xla  # here, so that torch-xla is asked for only where it is there

        return xla.keep_mask(seed, batch, head, q_index, k_index, prob=prob)
    arrays = [to_jax(narrow_ids(tensor)) for tensor in (batch, head, q_index, k_index)]
    return to_torch(_keep_mask(dropout.seed_words(seed), *arrays, prob)).to(batch.device)
