"""The projections of ``RingAttention`` as one packed parameter or as three."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ring_attn.module.attention import RingAttention

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def rows(module: "RingAttention") -> list[int]:
    """The rows of queries, keys and values in a packed projection."""
    kv_dim = module.num_kv_heads * module.head_dim
    return [module.embed_dim, kv_dim, kv_dim]


def separate(module: "RingAttention") -> None:
    """Makes three parameters of the packed one. The module's result is the same."""
    packed = module.in_proj_weight
    if packed is not None:
        for name, part in zip(SEPARATE, packed.detach().split(rows(module)), strict=True):
            module.register_parameter(name, nn.Parameter(part.clone(), packed.requires_grad))
        module.register_parameter("in_proj_weight", None)


def repack(module: "RingAttention", state_dict: dict[str, Tensor], prefix: str) -> None:
    """Changes the projections in ``state_dict`` to the form that the module has; leaves what does not fit, for torch to name."""
    packed, three = f"{prefix}in_proj_weight", [prefix + name for name in SEPARATE]
    if module.in_proj_weight is None:
        if packed in state_dict and module.kdim == module.vdim == module.embed_dim:
            state_dict.update(zip(three, state_dict.pop(packed).split(rows(module)), strict=True))
    elif all(name in state_dict for name in three) and len({state_dict[name].shape[1:] for name in three}) == 1:
        state_dict[packed] = torch.cat([state_dict.pop(name) for name in three])
