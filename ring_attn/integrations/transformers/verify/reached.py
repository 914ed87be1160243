"""Random weights that reach what a model can do: with those that a model begins with, no score comes near a soft cap of 50, and a
short batch ends before a window does. A comparison that does not reach a feature says nothing of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ring_attn.verification.verdict import TOLERANCE, largest

_PROJECTIONS = ("q_proj", "k_proj", "qkv", "query", "key", "q_b_proj", "kv_b_proj")
_DOUBLINGS = 10
_SEEN = 10 * TOLERANCE  # relative: by how much the logits must be moved by a feature


def reach_features(model: nn.Module, batch: Mapping[str, object]) -> str:
    """Enlarges queries and keys until a soft cap of attention moves the logits. What is to be said of it."""
    capped = [(module, name) for module in model.modules() for name in vars(module) if "softcap" in name and _caps(module, name)]
    tokens = batch.get("input_ids")
    if not capped or not isinstance(tokens, Tensor):
        return ""
    weights = [x for name, x in model.named_parameters() if name.endswith("weight") and _projects(name)]
    for doublings in range(_DOUBLINGS):
        if _moved(model, tokens, capped) > _SEEN:
            return f" (queries and keys {2**doublings} times as large, to reach the soft cap)" if doublings else ""
        with torch.no_grad():
            for weight in weights:
                weight.mul_(2)
    return " (which do not reach the soft cap)"


def _caps(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name), (int, float)) and any(True for _ in module.parameters())


def _projects(name: str) -> bool:
    return any(part in _PROJECTIONS for part in name.split("."))


@torch.no_grad()
def _moved(model: nn.Module, tokens: Tensor, capped: list[tuple[nn.Module, str]]) -> float:
    with_cap = model(input_ids=tokens).logits
    with _uncapped(capped):
        without = model(input_ids=tokens).logits
    return largest(with_cap - without) / max(largest(with_cap), 1e-6)


@contextmanager
def _uncapped(capped: list[tuple[nn.Module, str]]) -> Iterator[None]:
    values = [getattr(module, name) for module, name in capped]
    for module, name in capped:
        setattr(module, name, 1e9)
    try:
        yield
    finally:
        for (module, name), value in zip(capped, values, strict=True):
            setattr(module, name, value)
