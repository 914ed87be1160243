"""The cross entropy of each token without logits in float32: those of a vocabulary are often the largest tensors of a model."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.nn import functional

from ring_attn.sharding.autograd import Context
from ring_attn.sharding.reduction import HALF

_AT_ONCE = 2**25  # logits that are in float32 at a time: 128 MiB


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """The losses ``[tokens]`` of logits ``[tokens, vocabulary]`` and labels ``[tokens]``, those of
    ``torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")``; float64 logits stay float64.

    Half precision is converted a few tokens at a time, in the forward and once more in the backward, so that beside the logits only
    their gradient is held, in their dtype: 4 bytes for each of them instead of 12. Such logits must not be changed in place before
    the backward, and have no forward-mode derivative.
    """
    # A compiler fuses the conversion by itself, and function transforms have to see the operators.
    observed = torch.compiler.is_compiling() or _are_functorch_transforms_active()
    if logits.dtype in HALF and logits.numel() > _AT_ONCE and not observed:
        return _InChunks.apply(logits, labels, ignore_index, label_smoothing)
    return _losses(logits, labels, ignore_index, label_smoothing)


def _losses(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    wide = logits.float() if logits.dtype in HALF else logits
    return functional.cross_entropy(wide, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, _AT_ONCE // vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))


class _Options(Context, Protocol):
    options: tuple[int, float]  # ignore_index and label_smoothing


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Options, logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.options = ignore_index, label_smoothing
        return torch.cat([_losses(logits[rows], labels[rows], ignore_index, label_smoothing) for rows in _chunks(*logits.shape)])

    @staticmethod
    def backward(ctx: _Options, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is to be differentiated again
            losses = _losses(logits, labels, *ctx.options)
            return torch.autograd.grad(losses, logits, cotangent, create_graph=True)[0], None, None, None
        gradient = torch.empty_like(logits)
        for rows in _chunks(*logits.shape):
            with torch.enable_grad():
                chunk = logits[rows].detach().requires_grad_()
                losses = _losses(chunk, labels[rows], *ctx.options)
            (gradient[rows],) = torch.autograd.grad(losses, chunk, cotangent[rows])
        return gradient, None, None, None
