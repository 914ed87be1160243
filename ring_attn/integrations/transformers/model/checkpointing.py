"""Attention kept in the activation checkpoints of a context-parallel model, whoever makes them."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring_attn.training.checkpoint import KeepingAttention

Checkpoint = Literal["attention", "offload"] | None
# By which layers of transformers, and modules in torch's ``checkpoint_wrapper`` (FSDP's activation checkpointing), run a function
# under a checkpoint.
_NAMES = ("_gradient_checkpointing_func", "checkpoint_fn")


def check_checkpoint(checkpoint: object) -> None:
    if checkpoint not in ("attention", "offload", None):
        raise ValueError(
            f'checkpoint must be "attention" (kept on the device), "offload" (kept in host memory) or None (computed again); got '
            f"{checkpoint!r}"
        )


def keep_in_checkpoints(model: nn.Module, offload: bool) -> None:
    """Checkpointing may be turned on at any time, so this is asked with each forward."""
    for module in model.modules():
        for name in _NAMES:
            function = vars(module).get(name)
            if function is not None and not isinstance(function, _Keeping) and not _has_contexts(function):
                setattr(module, name, _Keeping(function, offload))


def keep_no_more(model: nn.Module) -> None:
    for module in model.modules():
        for name in _NAMES:
            function = vars(module).get(name)
            if isinstance(function, _Keeping):
                setattr(module, name, function.checkpoint)


class _Keeping:
    """A checkpointing function, whose functions' ring calls are kept."""

    def __init__(self, checkpoint: Callable[..., Any], offload: bool) -> None:
        self.checkpoint, self._offload = checkpoint, offload

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.checkpoint(KeepingAttention(function, self._offload), *arguments, **options)
        if self._offload:
            _refuse_offload()
        # Newer transformers make the checkpoint in the layer's forward, so that the graph of a compiled layer has it.
        return self.checkpoint(function, *arguments, **options, use_reentrant=False, context_fn=_keeping_the_operator)


def _keeping_the_operator() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.ring_attn.forward.default])


@torch.compiler.disable
def _refuse_offload() -> None:
    raise NotImplementedError(
        'checkpoint="offload" cannot keep attention in host memory where torch.compile has the checkpoint in its graph, as that of '
        'layers of this transformers; use checkpoint="attention", or do not compile the layers'
    )


def _has_contexts(function: Any) -> bool:
    """Whether its user has said what is kept, by a ``context_fn``."""
    return "context_fn" in getattr(function, "keywords", {})
