"""Layers with a state by torch's face: a case's tensors, results and gradients."""

from functools import partial
from itertools import pairwise
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


def stepwise(q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens=None):
    """Delta rules token by token, in torch: an operator as fla's."""
    assert output_final_state
    ends = range(v.shape[1] + 1)[:: v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [(row, start, end) for row in range(v.shape[0]) for start, end in pairwise(ends)]
    states, outputs = [], []
    if initial_state is None:
        initial_state = v.new_zeros(len(rows), v.shape[2], k.shape[-1], v.shape[-1])
    for state, (row, start, end) in zip(initial_state, rows, strict=True):
        for t in range(start, end):
            decay = g[row, t].exp()
            state = state * decay.view(*decay.shape, *(1,) * (3 - decay.ndim))
            error = v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t])
            state = state + torch.einsum("hk,hv,h->hkv", k[row, t], error, beta[row, t])
            outputs.append(torch.einsum("hkv,hk->hv", state, q[row, t]) * k.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs).view(v.shape), torch.stack(states)


def stepwise_ssd(x, dt, A, B, C, chunk_size, D=None, initial_states=None, seq_idx=None, return_final_states=False):
    """Token by token, in torch: an operator as mamba_ssm's, where what enters is of document 0."""
    assert return_final_states and chunk_size
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    state, outputs = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states, []
    for t in range(x.shape[1]):
        if seq_idx is not None:
            state = state * (seq_idx[:, t] == (seq_idx[:, t - 1] if t else 0))[:, None, None, None]
        state = (dt[:, t] * A).exp()[..., None, None] * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        skip = 0 if D is None else x[:, t] * (D if D.ndim == 2 else D[:, None])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + skip)
    return torch.stack(outputs, 1), state


def operator_of(case: Case) -> Any:
    return stepwise_ssd if case.function == "ssd" else stepwise


def sharded(x: torch.Tensor, ring: Ring) -> torch.Tensor:
    """This rank's part of what has a sequence."""
    return ring.shard(x) if x.ndim > 1 and x.shape[1] == LENGTH else x


def gradients_of(
    case: Case, operands, state, given, ids, of: slice = slice(None), **where: Any
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """``((y, last), gradients by name)``; the state's is called "state". ``of``: of which results the loss is."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in {**operands, "state": state}.items()}
    settings = case.settings | ({"chunk_size": CHUNK} if case.chunked and "operator" not in where else {})
    full = [leaves.get(name) for name in case.shapes]
    function = getattr(ring_attn, case.function)
    results = function(*full, **settings, initial_state=leaves["state"], output_final_state=True, segment_ids=ids, **where)
    torch.autograd.backward(results[of], [x.to(y.dtype) for x, y in zip(given, results, strict=True)][of])
    gradients = {name: x.grad for name, x in leaves.items()}
    if of != slice(None):  # one result does not depend on all of them
        gradients = {name: torch.zeros_like(leaves[name]) if x is None else x for name, x in gradients.items()}
    return tuple(x.detach() for x in results), gradients
