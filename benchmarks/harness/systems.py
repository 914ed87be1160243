"""Shared by the benchmarks of one GPU and of a ring: a case, its inputs, and a system that is ready to be timed on them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

import ring_attn
from benchmarks.harness.timing import Timed

Attention = Callable[..., torch.Tensor]
Arrange = Callable[[torch.Tensor], torch.Tensor]
OPERATIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # relative to the forward


@dataclass(frozen=True)
class Case:
    """Self-attention over one sequence. `documents`: the lengths of packed documents, each of which sees only itself."""

    name: str
    length: int
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    sinks: bool = False  # a logit of 1 for each head, which takes no gradient here

    @property
    def pairs(self) -> float:
        """Visible query-key pairs, counting a causal square as half, as is customary."""
        if self.window is not None:
            return self.length * self.window - self.window**2 / 2
        if self.documents:
            return sum(length**2 for length in self.documents) / 2
        return self.length**2 / (2 if self.causal else 1)

    def tflop(self, phase: str) -> float:
        return 4 * self.heads * self.dim * self.pairs * OPERATIONS[phase] / 1e12


@dataclass(frozen=True)
class Inputs:
    """bfloat16, `[1, length, heads, dim]`, standard normal: query, key, value and the gradient of the output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.qkv, self.dout))


def make_inputs(case: Case, device: torch.device | str, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(1, case.length, heads, case.dim) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    return Inputs(*(torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes))


@dataclass(frozen=True)
class Prepared:
    """A system's passes on a case, keyed by the names in OPERATIONS. `opened` must be closed when the case is done."""

    passes: dict[str, Timed]
    arrange_back: Arrange
    opened: ExitStack = field(default_factory=ExitStack)

    def results(self, gradients: str) -> list[torch.Tensor]:
        """out, dq, dk, dv as `[1, length, heads, dim]`; `gradients`: the pass that computes the gradients."""
        return [self.arrange_back(x) for x in (self.passes["forward"].call(), *self.passes[gradients].call())]


def through_torch(attention: Attention, inputs: Inputs, arrange: Arrange = lambda x: x) -> Prepared:
    """`arrange` converts `[1, length, heads, dim]` to the system's own layout and its results back (it is its own inverse)."""
    leaves = [arrange(x).detach().requires_grad_() for x in inputs.qkv]
    dout = arrange(inputs.dout)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*leaves)

    @cache
    def graph() -> tuple[torch.Tensor, torch.Tensor]:
        """An output with its graph retained, to time the backward alone, and its gradient in the same layout."""
        out = attention(*leaves)
        return out, torch.empty_like(out).copy_(dout)

    def backward() -> tuple[torch.Tensor, ...]:
        out, gradient = graph()
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(*leaves), leaves, dout)

    passes = {"forward": Timed(forward), "backward": Timed(backward), "both": Timed(both)}
    return Prepared(passes, lambda x: arrange(x.detach()))


def through_jax(attention: Callable[..., Any], inputs: Inputs) -> Prepared:
    """No torch in the timed part; the backward is compiled separately, with the residuals of a forward as its operands."""
    import jax

    from torch_bridge.backends.dlpack import to_jax, to_torch

    tensors = (*inputs.qkv, inputs.dout)
    arrays = list(map(to_jax, tensors))

    def after_torch() -> None:
        arrays[:] = map(to_jax, tensors)

    def before_torch(result: Any) -> None:
        to_torch(jax.tree.leaves(result)[0])

    forward = jax.jit(attention)
    out, transpose = jax.vjp(forward, *arrays[:3])
    backward = jax.jit(lambda transpose, dout: transpose(dout.astype(out.dtype)))
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout.astype(out.dtype)))
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(*arrays[:3]),
        "backward": lambda: backward(transpose, arrays[3]),
        "both": lambda: both(*arrays),
    }
    wait = jax.block_until_ready
    passes = {name: Timed(call, wait, after_torch, before_torch) for name, call in calls.items()}
    return Prepared(passes, lambda array: torch.from_dlpack(wait(array)))


def ours(platform: str, inputs: Inputs, **options: Any) -> Prepared:
    return through_torch(partial(ring_attn.ring_attention, platform=platform, **options), inputs)


def difference(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The root mean square of the difference over that of the truth; the largest value among out, dq, dk, dv."""
    return max(_difference(*pair) for pair in zip(found, truth, strict=True))


def _difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    heads = min(found.shape[2], truth.shape[2])
    # If K/V heads were repeated, the gradient is the sum over the copies.
    found, truth = (x.float().unflatten(2, (heads, -1)).sum(3) for x in (found, truth))
    return float((found - truth).square().mean().sqrt() / truth.square().mean().sqrt())
