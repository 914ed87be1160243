"""Attention over an empty batch or sequence, which has no query-key pair: nothing is computed and nothing is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_bridge.backends.operation import Results, TensorSpec
from torch_bridge.mesh.protocol import Tensors


@dataclass(frozen=True, eq=False)
class Empty:
    """The program of an empty request. Results are empty or 0; without keys the LSE is that of the sinks, the operand with
    this index, or ``-inf``."""

    results: tuple[TensorSpec, ...]
    device: torch.device
    sinks: int
    operators: None = None

    def forward(self, operands: Tensors) -> Results:
        (out_shape, dtype), (lse_shape, lse_dtype) = self.results
        lse = torch.full(lse_shape, float("-inf"), dtype=lse_dtype, device=self.device)
        if (sinks := operands[self.sinks]) is not None:
            lse[:] = per_head(sinks.to(lse_dtype), lse_shape[1]).logsumexp(-1)[:, None]
        return torch.zeros(out_shape, dtype=dtype, device=self.device), lse

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        gradients = [torch.zeros_like(x) for number in wanted if (x := operands[number]) is not None]
        sinks, (_, dlse) = operands[self.sinks], cotangents
        if self.sinks in wanted and sinks is not None and dlse is not None:
            gradients[list(wanted).index(self.sinks)] = _sink_gradient(sinks, dlse)
        return gradients


def per_head(sinks: torch.Tensor, heads: int) -> torch.Tensor:
    """Sinks ``[heads]``, ``[n]`` (shared by all heads) or ``[heads, n]`` as ``[heads, n]``."""
    if sinks.dim() == 2:
        return sinks
    return sinks[:, None] if sinks.shape[0] == heads else sinks.expand(heads, -1)


def _sink_gradient(sinks: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """``lse = logsumexp(sinks)`` in every row, so each sink gets its softmax share of the sum of the rows' cotangents."""
    each = per_head(sinks.to(dlse.dtype), dlse.shape[1]).softmax(-1) * dlse.sum((0, 2))[:, None]
    shared = sinks.dim() == 1 and sinks.shape[0] != dlse.shape[1]
    return (each.sum(0) if shared else each.reshape(sinks.shape)).to(sinks.dtype)
