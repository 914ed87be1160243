"""What transformers' "eager" attention gives a query that sees no key, as padding before the first token: the mean of all values.

It adds the lowest number of the dtype to every score, so the scores vanish beside it, while their gradients do not. It matters only
because the last such token predicts the first token, and that label counts in the model's loss. With "sdpa" the output is 0.
"""

import torch
from torch import Tensor

from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.ring import Ring


def mean_of_values(query: Tensor, key: Tensor, value: Tensor, scale: float, keys: Sequence) -> Tensor:
    """For every query ``[batch, local, heads, dim]`` the mean of the values of the whole sequence, with the gradient of a softmax
    whose weights are all equal: around equal weights it is linear in the scores, so a sum over the keys is all that ranks need to
    exchange. A soft cap's part in that gradient is left out."""
    real = keys.ring.positions(keys.length, device=key.device) < keys.length
    key, value = (x.masked_fill(~real[:, None, None], 0) for x in (key, value))
    mean = _total(value.sum(1), keys) / keys.length  # [batch, kv heads, value dim]
    spread = value.detach() - mean.detach()[:, None]
    slope = _total(torch.einsum("bkhd,bkhe->bhde", key, spread), keys) * (scale / keys.length)
    groups = query.shape[2] // key.shape[2]
    moved = torch.einsum("bqhd,bhde->bqhe", query, slope.repeat_interleave(groups, 1))
    return mean.repeat_interleave(groups, 1)[:, None] + moved - moved.detach()


def _total(part: Tensor, keys: Sequence) -> Tensor:
    """The sum over the ring, with its gradient."""
    whole: Tensor = Ring(keys.ring.mesh, mesh_dim=keys.ring.mesh_dim).unshard(part[None], dim=0)
    return whole.sum(0)
