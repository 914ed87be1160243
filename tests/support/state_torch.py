"""Layers with a state by torch's face: a case's tensors, results and gradients."""

from functools import partial
from typing import Any

import torch
from state_cases import CHUNK, LENGTH, Case, cotangents, inputs

import ring_attn
from ring_attn import Ring


def tensors(case: Case, device: str = "cpu") -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[torch.Tensor, ...]]:
    """Operands, the state that enters, and the cotangents of the results; float64."""
    operands, state = inputs(case)
    moved = partial(torch.tensor, device=device)
    return {name: moved(x) for name, x in operands.items()}, moved(state), tuple(map(moved, cotangents(case)))


def sharded(x: torch.Tensor, ring: Ring) -> torch.Tensor:
    """This rank's part of what has a sequence."""
    return ring.shard(x) if x.ndim > 1 and x.shape[1] == LENGTH else x


def gradients_of(case: Case, operands, state, given, ids, **where: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """``((y, last), gradients by name)``; the state's is called "state"."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in {**operands, "state": state}.items()}
    settings = case.settings | ({"chunk_size": CHUNK} if case.chunked else {})
    full = [leaves.get(name) for name in case.shapes]
    function = getattr(ring_attn, case.function)
    results = function(*full, **settings, initial_state=leaves["state"], output_final_state=True, segment_ids=ids, **where)
    torch.autograd.backward(results, given)
    return tuple(x.detach() for x in results), {name: x.grad for name, x in leaves.items()}
