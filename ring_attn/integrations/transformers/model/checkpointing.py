"""Attention kept in the activation checkpoints of a context-parallel model, whoever makes them, and their inputs on the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring_attn.memory import Levers
from ring_attn.training.checkpoint import KeepingAttention, moved_to_host
from torch_bridge.tracing import untraced

# By which layers of transformers, and modules in torch's ``checkpoint_wrapper`` (FSDP's activation checkpointing), run a function
# under a checkpoint.
_OF_WRAPPER = "checkpoint_fn"
_NAMES = ("_gradient_checkpointing_func", _OF_WRAPPER)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether the module runs something under a checkpoint."""
    return bool(getattr(module, "gradient_checkpointing", False)) or hasattr(module, _OF_WRAPPER)


def check_checkpoint(checkpoint: object) -> None:
    if checkpoint not in ("attention", "offload", None):
        raise ValueError(
            f'checkpoint must be "attention" (kept on the device), "offload" (kept in host memory) or None (computed again); got '
            f"{checkpoint!r}"
        )


def keep_in_checkpoints(model: nn.Module, levers: Levers) -> None:
    """Checkpointing may be turned on at any time, so this is asked with each forward."""
    for module in model.modules():
        for name in _NAMES:
            function = vars(module).get(name)
            if function is None or isinstance(function, _Keeping):
                continue
            keeps = levers.checkpoint is not None and not _has_contexts(function)
            if keeps or levers.offload_inputs:
                setattr(module, name, _Keeping(function, keeps, levers))


def keep_no_more(model: nn.Module) -> None:
    for module in model.modules():
        for name in _NAMES:
            function = vars(module).get(name)
            if isinstance(function, _Keeping):
                setattr(module, name, function.checkpoint)


class _Keeping:
    """A checkpointing function; ``keeps``: whether its functions' ring calls are kept."""

    def __init__(self, checkpoint: Callable[..., object], keeps: bool, levers: Levers) -> None:
        self.checkpoint, self._keeps, self._levers = checkpoint, keeps, levers

    def __call__(self, function: Callable[..., object], *arguments: object, **options: object) -> object:
        offload = self._keeps and self._levers.checkpoint == "offload"
        if torch.compiler.is_compiling():
            if offload or self._levers.offload_inputs:
                _refuse_offload()
            # Newer transformers make the checkpoint in the layer's forward, so that the graph of a compiled layer has it.
            return self.checkpoint(function, *arguments, **options, use_reentrant=False, context_fn=_keeping_the_operator)
        function = KeepingAttention(function, offload) if self._keeps else function
        moved = arguments[0] if self._levers.offload_inputs and arguments else None
        with moved_to_host(moved) if isinstance(moved, Tensor) else nullcontext():
            return self.checkpoint(function, *arguments, **options)


def _keeping_the_operator() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return create_selective_checkpoint_contexts([torch.ops.ring_attn.forward.default])


@untraced
def _refuse_offload() -> None:
    raise NotImplementedError(
        'checkpoint="offload" and offload_inputs cannot move what is kept to host memory where torch.compile has the checkpoint in '
        'its graph, as that of layers of this transformers; use checkpoint="attention" alone, or do not compile the layers'
    )


def _has_contexts(function: object) -> bool:
    """Whether its user has said what is kept, by a ``context_fn``."""
    return "context_fn" in getattr(function, "keywords", {})
