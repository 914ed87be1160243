"""The key and value of ``add_bias_kv``, which every query sees, merged into what attention to the ring's keys gave."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ring_attn.functional import is_dtensor

if TYPE_CHECKING:
    from ring_attn.module.attention import RingAttention


def check_dropout(module: "RingAttention") -> None:
    """Attention drops weights of the ring's keys; this one is beside them."""
    if module.bias_k is not None and module.training and module.dropout > 0:
        raise NotImplementedError(
            f"add_bias_kv must train without dropout, got dropout={module.dropout}: set it to 0, or leave out add_bias_kv"
        )


def of_padding(lse: Tensor, sinks: Tensor | None, ids: Mapping[str, Tensor | None]) -> Tensor:
    """``lse [batch, heads, seq]`` with that of padding's rows made of ``sinks [heads, n]`` again. It is the same number, but with
    the gradient that attention leaves out, as nothing reads padding: here it does, for it sees the key of ``add_bias_kv``."""
    given = next((x for x in (ids["q_segment_ids"], ids["kv_segment_ids"]) if x is not None), None)
    if sinks is None or given is None:
        return lse
    padding: Tensor = torch.atleast_2d(given).lt(0)[:, None]
    if is_dtensor(lse):
        from torch.distributed.tensor import DTensor, Replicate

        padding = DTensor.from_local(padding, lse.device_mesh, [Replicate()] * lse.device_mesh.ndim, run_check=False)
    return torch.where(padding, sinks.to(lse.dtype).logsumexp(1)[:, None], lse)


def join_bias_kv(module: "RingAttention", q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """``out [batch, seq, heads, dim]`` and ``lse [batch, heads, seq]`` of attention to the ring's keys.

    The weight of the key is ``w = exp(s) / (exp(s) + exp(lse)) = sigmoid(s - lse)``; everything else is scaled by ``1 - w``."""
    logit = (q.to(lse.dtype) * _per_query_head(module, module.bias_k, lse.dtype)).sum(-1)
    logit = logit * (module.head_dim**-0.5 if module.scale is None else module.scale)
    if module.softcap is not None:
        logit = module.softcap * torch.tanh(logit / module.softcap)
    difference = (logit - lse.transpose(1, 2)).unsqueeze(-1)
    weight, rest = torch.sigmoid(difference), torch.sigmoid(-difference)  # 1 - weight would cancel
    return (rest * out + weight * _per_query_head(module, module.bias_v, lse.dtype)).to(out.dtype)


def _per_query_head(module: "RingAttention", extra: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert extra is not None
    groups = module.num_heads // module.num_kv_heads
    return extra.to(dtype).view(module.num_kv_heads, module.head_dim).repeat_interleave(groups, 0)
