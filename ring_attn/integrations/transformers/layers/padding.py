"""What padding before the first token gets from attention, where a label makes it count."""

import torch
from torch import Tensor

from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.ring import Ring


def mean_of_values(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, keys: Sequence) -> Tensor:
    """What transformers' "eager" attention gives a query that sees no key, as padding before the first token: the mean of the
    values of the whole sequence, for queries ``[batch, local, heads, dim]``. It adds the lowest number of the dtype to every
    score, so the scores vanish beside it, while their gradients do not. It matters only because the last such token predicts the
    first token, and that label counts in the model's loss. With "sdpa" the output is 0."""
    real = keys.ring.positions(keys.length, device=key.device) < keys.length
    key, value = (x.masked_fill(~real[:, None, None], 0) for x in (key, value))
    mean = _total(value.sum(1), keys) / keys.length  # [batch, kv heads, value dim]
    spread = (value.detach() - mean.detach()[:, None]) * (real[:, None, None].to(value.dtype) / keys.length)
    groups = query.shape[2] // key.shape[2]
    if softcap is None:
        moved = _moved(query, key, spread, scale, keys)
    else:
        moved = _moved_under_a_cap(query, key, spread, scale, softcap, keys)
    return mean.repeat_interleave(groups, 1)[:, None] + moved - moved.detach()


def _moved(query: Tensor, key: Tensor, spread: Tensor, scale: float, keys: Sequence) -> Tensor:
    """Of which the gradients are those of the scores: around equal weights a softmax is linear in them, so a sum over the keys is
    all that ranks need to exchange."""
    slope = _total(torch.einsum("bkhd,bkhe->bhde", key, spread), keys) * scale
    return torch.einsum("bqhd,bhde->bqhe", query, slope.repeat_interleave(query.shape[2] // key.shape[2], 1))


def _moved_under_a_cap(query: Tensor, key: Tensor, spread: Tensor, scale: float, softcap: float, keys: Sequence) -> Tensor:
    """The same where a soft cap bends the scores, which then must be made, of all ranks' padding and this rank's keys."""
    assert keys.left is not None  # nothing else is averaged
    groups, padding = query.shape[2] // key.shape[2], int(keys.left.max())
    whole = keys.ring.unshard(query)[:, :padding]
    key, spread = (x.repeat_interleave(groups, 2) for x in (key, spread))
    scores = softcap * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", whole, key) * (scale / softcap))
    moved = _total(torch.einsum("bhqk,bkhe->bqhe", scores, spread), keys)
    return keys.ring.shard(torch.nn.functional.pad(moved, (0, 0, 0, 0, 0, keys.padded - padding)))


def _total(part: Tensor, keys: Sequence) -> Tensor:
    """The sum over the ring, with its gradient."""
    whole: Tensor = Ring(keys.ring.mesh, mesh_dim=keys.ring.mesh_dim).unshard(part[None], dim=0)
    return whole.sum(0)
