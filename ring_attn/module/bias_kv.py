"""The key and value of ``add_bias_kv``, which every query sees, merged into what attention to the ring's keys gave."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ring_attn.functional import is_dtensor
from ring_attn.sharding.sequence import positions
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.job.ring import tensors_per_sequence


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


def join_bias_kv(module: Any, q: Tensor, out: Tensor, lse: Tensor, keys: int, seed: Tensor | None) -> Tensor:
    """``out [batch, seq, heads, dim]`` and ``lse [batch, heads, seq]`` of attention to ``keys`` of this process and others.

    The weight of the key is ``w = exp(s) / (exp(s) + exp(lse)) = sigmoid(s - lse)``; everything else is scaled by ``1 - w``.
    ``seed``: that of the dropout, None without."""
    logit = (q.to(lse.dtype) * _per_query_head(module, module.bias_k, lse.dtype)).sum(-1)
    logit = logit * (module.head_dim**-0.5 if module.scale is None else module.scale)
    if module.softcap is not None:
        logit = module.softcap * torch.tanh(logit / module.softcap)
    difference = (logit - lse.transpose(1, 2)).unsqueeze(-1)
    weight, rest = torch.sigmoid(difference), torch.sigmoid(-difference)  # 1 - weight would cancel
    if seed is not None:
        weight = weight * _kept(module, q, keys, seed) / (1 - module.dropout)
    return (rest * out + weight * _per_query_head(module, module.bias_v, lse.dtype)).to(out.dtype)


def _per_query_head(module: Any, extra: Tensor, dtype: torch.dtype) -> Tensor:
    groups = module.num_heads // module.num_kv_heads
    return extra.to(dtype).view(module.num_kv_heads, module.head_dim).repeat_interleave(groups, 0)


def _kept(module: Any, q: Tensor, keys: int, seed: Tensor) -> Tensor:
    """Whether dropout keeps the key of ``add_bias_kv``, [N, L, num_heads, 1]; its index is one past the ring's last key."""
    backend = backend_of(q.device)
    keep_mask = torch.compiler.disable(backend.keep_mask)
    size = tensors_per_sequence(backend.resolve(module.mesh, module.mesh_dim))
    rows = positions(q.shape[1] * size, module.mesh, mesh_dim=module.mesh_dim, layout=module.layout, device=q.device)
    batch, heads = (torch.arange(count, device=q.device) for count in (q.shape[0], module.num_heads))
    column = torch.tensor(keys * size, device=q.device)
    return keep_mask(int(seed), batch[:, None, None], heads, rows[:, None], column, prob=module.dropout).unsqueeze(-1)
