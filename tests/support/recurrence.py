"""A second operation of the bridge: ``h[t] = a[t] * h[t - 1] + x[t]`` along a sequence that is sharded over a ring."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.operation import Operation, TensorSpec
from torch_bridge.call import autograd
from torch_bridge.call.programs import describe


@dataclass(frozen=True)
class Recurrence(Operation):
    """Of ``decay`` and ``x [batch, seq, width]``: ``h`` of the same form, and this rank's last ``h [batch, width]``."""

    name = "recurrence"
    operands = ("decay", "x")
    differentiated = (0, 1)

    def __str__(self):
        return "recurrence"

    def check(self, operands, ring):
        if operands[0].shape != operands[1].shape:
            raise ValueError(f"decay must have the shape of x, got {list(operands[0].shape)} and {list(operands[1].shape)}")

    def results(self, specs):
        shape, dtype = specs[1].shape, specs[1].dtype
        return TensorSpec(tuple(shape), dtype), TensorSpec((shape[0], shape[2]), dtype)

    def local(self, request, place):
        self.check(request.specs, request.ring)
        return _Local(place.axis_name)


@dataclass(frozen=True)
class _Local:
    axis: Any

    def forward(self, decay, x):
        steps = partial(lax.associative_scan, _after, axis=1)
        product, own = steps((decay, x))
        if self.axis is None:
            return own, own[:, -1]
        # What enters this rank is what the ranks before it leave, each after the other.
        products, ends = (lax.all_gather(y[:, -1], self.axis, axis=1) for y in (product, own))
        _, states = steps((products, ends))
        rank = lax.axis_index(self.axis)
        before = jnp.where(rank == 0, 0, jnp.take(states, jnp.maximum(rank - 1, 0), axis=1))
        h = own + product * before[:, None]
        return h, h[:, -1]

    def backward(self, wanted, decay, x, h, last, dh, dlast):
        dlast = jnp.zeros_like(last) if dlast is None else dlast
        gradients = jax.vjp(self.forward, decay, x)[1]((dh, dlast))
        return [gradients[number] for number in wanted]


def _after(first, second):
    """One affine step after another."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def recurrence(decay: torch.Tensor, x: torch.Tensor, mesh: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    h, last = autograd.apply(_key(mesh, x.device), (decay, x))
    return h, last


@torch.compiler.assume_constant_result
def _key(mesh: Any, device: torch.device) -> str:
    return describe(backend_of(device).resolve(mesh, None), Recurrence(), ())


def sequential(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The whole sequence, step by step."""
    h, state = [], torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        h.append(state)
    return torch.stack(h, 1)
