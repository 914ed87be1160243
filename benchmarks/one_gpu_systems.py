"""The systems of benchmarks/one_gpu.py: this library and its peers, each as it is meant to be called.

Every one takes the same numbers in the layout it likes best, made before anything is timed. `SYSTEMS` names them; each entry
prepares a case or raises, and then the reason stands in the results instead of figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ring_attn
from timing import Timed


@dataclass(frozen=True)
class Case:
    """Self-attention of one sequence. `documents`: the lengths of packed documents, which see only themselves."""

    name: str
    length: int
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()

    @property
    def pairs(self) -> float:
        """Visible pairs of query and key, counting a causal square as half of it, as everyone does."""
        if self.window is not None:
            return self.length * self.window - self.window**2 / 2
        if self.documents:
            return sum(length**2 for length in self.documents) / 2
        return self.length**2 / (2 if self.causal else 1)

    def tflop(self, phase: str) -> float:
        return 4 * self.heads * self.dim * self.pairs * (2.5 if phase == "backward" else 1) / 1e12


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


@dataclass(frozen=True)
class Prepared:
    """Forward and backward alone, ready to be timed; `results` is out, dq, dk, dv as tensors `[1, length, heads, dim]`."""

    forward: Timed
    backward: Timed
    results: Callable[[], list[torch.Tensor]]


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    shapes = [(1, case.length, held, case.dim) for held in heads]
    return Inputs(*(torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for shape in shapes))


def through_torch(attention: Callable[..., torch.Tensor], inputs: Inputs, arrange: Callable = lambda x: x) -> Prepared:
    """`arrange` turns `[1, length, heads, dim]` into the system's own layout, and its results back (it is its own inverse).

    The backward is timed by itself: torch.autograd.grad on a graph that is kept.
    """
    leaves = [arrange(x).detach().requires_grad_() for x in inputs.qkv]
    out = attention(*leaves)
    dout = torch.empty_like(out).copy_(arrange(inputs.dout))

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*leaves)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Prepared(Timed(forward), Timed(backward), lambda: [arrange(x.detach()) for x in (forward(), *backward())])


def through_jax(attention: Callable[..., Any], inputs: Inputs) -> Prepared:
    """No torch in what is timed; the backward by itself, compiled with the residuals of a forward as its operands."""
    import jax
    import jax.numpy as jnp

    *arrays, dout = (jax.dlpack.from_dlpack(x) for x in (*inputs.qkv, inputs.dout))
    forward = jax.jit(attention)
    out, transpose = jax.vjp(forward, *arrays)
    backward = jax.jit(lambda transpose, dout: transpose(dout))
    dout = dout.astype(out.dtype)

    def results() -> list[torch.Tensor]:
        found = jax.block_until_ready((forward(*arrays), *backward(transpose, dout)))
        return [torch.from_dlpack(jnp.asarray(x)) for x in found]

    wait = jax.block_until_ready
    return Prepared(Timed(lambda: forward(*arrays), wait), Timed(lambda: backward(transpose, dout), wait), results)


def ours(platform: str, case: Case, inputs: Inputs) -> Prepared:
    options: dict[str, Any] = dict(causal=case.causal, platform=platform, mesh="local")
    if case.window is not None:
        options["sliding_window"] = (case.window - 1, 0)  # the token itself and those before it
    if case.documents:
        options["q_segment_ids"] = segment_ids(case, inputs.query.device)
    return through_torch(lambda q, k, v: ring_attn.ring_attention(q, k, v, **options), inputs)


def segment_ids(case: Case, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(len(case.documents), dtype=torch.int32, device=device)
    return numbers.repeat_interleave(torch.tensor(case.documents, device=device))[None]


def ours_in_jax(platform: str, case: Case, inputs: Inputs) -> Prepared:
    import jax_core

    return through_jax(partial(jax_core.ring_attention, causal=case.causal, platform=platform), inputs)


def sdpa(backend: SDPBackend, case: Case, inputs: Inputs) -> Prepared:
    def attention(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    return through_torch(attention, inputs, lambda x: x.transpose(1, 2))


def flex(case: Case, inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # a few shapes more in one function's cache, and it would be compiled for any shape, which is slower
    compiled = torch.compile(flex_attention, dynamic=False)
    device = inputs.query.device.type
    mask = create_block_mask(visible_causal, None, None, case.length, case.length, device) if case.causal else None

    def attention(q, k, v):
        return compiled(q, k, v, block_mask=mask, enable_gqa=case.heads != case.kv_heads)

    return through_torch(attention, inputs, lambda x: x.transpose(1, 2).contiguous())


def visible_causal(batch, head, q_index, k_index):
    return q_index >= k_index


def jax_cudnn(case: Case, inputs: Inputs) -> Prepared:
    import jax

    return through_jax(partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn"), inputs)


def ejkernel(case: Case, inputs: Inputs) -> Prepared:
    attention = import_module("ejkernel.kernels._triton.flash_attention").flash_attention
    return through_jax(partial(attention, causal=case.causal), inputs)


SYSTEMS: dict[str, Callable[[Case, Inputs], Prepared]] = {
    "FlashAttention-2 (SDPA)": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "cuDNN (SDPA)": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": flex,
    "triton": partial(ours, "triton"),
    "cuda": partial(ours, "cuda"),
    "auto": partial(ours, "auto"),
    "xla": partial(ours, "xla"),
    "triton, in JAX": partial(ours_in_jax, "triton"),
    "cuda, in JAX": partial(ours_in_jax, "cuda"),
    "cuDNN (jax.nn)": jax_cudnn,
    "ejkernel Triton": ejkernel,
}
