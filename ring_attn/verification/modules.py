"""What each module of a model got and returned, and the first that differs between the ring and one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ring_attn.verification.verdict import relative

Seen = dict[str, Tensor]
_GETS = "what {} gets"


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """The first tensor that each module got and returned, by its name, in the order of the events. Modules that run more than once
    are left out: ranks may call them in another order, as Gemma 4 its rotary embedding, in that of a set of strings."""
    seen: Seen = {}
    again: set[str] = set()
    handles = []

    def keep(name: str, tensor: Tensor) -> None:
        if name in seen:
            again.add(name)
        seen[name] = tensor.detach()

    for name, module in model.named_modules():

        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], name: str = name) -> None:
            first = next((x for x in (*args, kwargs.get("hidden_states")) if isinstance(x, Tensor)), None)
            if first is not None and first.is_floating_point():
                keep(_GETS.format(name), first)

        def after(_: nn.Module, args: object, output: object, name: str = name) -> None:
            first = output if isinstance(output, Tensor) else next(iter(output), None) if isinstance(output, tuple) else None
            if isinstance(first, Tensor) and first.is_floating_point():
                keep(name, first)

        if name:
            handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for name in again:
            del seen[name]


def first_that_differs(sharded: Seen, whole: Seen, real: Callable[[Tensor], Tensor], tolerance: float) -> str | None:
    """In words; None where none does. ``sharded``, ``whole``: ``[batch, seq, ...]``. ``real``: where a token is in such a tensor,
    bool ``[batch, seq]``."""
    for name, tensor in sharded.items():
        expected = whole.get(name)
        if expected is None or expected.shape[1:] != tensor.shape[1:] or expected.shape[0] not in (1, tensor.shape[0]):
            continue
        expected = expected.expand_as(tensor)  # positions may be one row for all
        places = real(tensor)
        if relative(tensor[places], expected[places]) > tolerance:
            return f"the first that differs is {name}, {_why(name)}"
    return None


def _why(name: str) -> str:
    if name.startswith(_GETS.split("{}")[0]):
        return "whose inputs are right, so the error is between modules: in attention, or in a custom operation"
    return "whose input is right: it mixes tokens, or its positions or mask are others"


def trimmed(seen: Mapping[str, Tensor], length: int) -> Seen:
    """Of tensors ``[batch, seq, ...]`` that are at least so long, the first ``length`` positions."""
    return {name: x[:, :length] for name, x in seen.items() if x.ndim > 1 and x.shape[1] >= length}


def token_mask(batch: Tensor | Mapping[str, object], like: Tensor) -> Tensor:
    """Where a token is, bool ``[batch, seq]``."""
    mask = None if isinstance(batch, Tensor) else batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == like.shape[:2]:
        return mask != 0
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
