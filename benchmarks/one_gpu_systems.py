"""The systems of benchmarks/one_gpu.py: this library and its peers, each as it is meant to be called.

Each takes the same numbers in its preferred layout, made before anything is timed. `SYSTEMS` names them; each entry
prepares a case or raises, and then the results contain the reason instead of figures.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import systems
from systems import Case, Inputs, Prepared, through_jax, through_torch


def ours(platform: str, case: Case, inputs: Inputs) -> Prepared:
    options: dict[str, Any] = dict(causal=case.causal, mesh="local")
    if case.window is not None:
        options["sliding_window"] = (case.window - 1, 0)  # the token itself and those before it
    if case.documents:
        lengths = torch.tensor(case.documents, device=inputs.query.device)
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=inputs.query.device)
        options["q_segment_ids"] = numbers.repeat_interleave(lengths)[None]
    return systems.ours(platform, inputs, **options)


def ours_in_jax(platform: str, case: Case, inputs: Inputs) -> Prepared:
    import jax_core

    return through_jax(partial(jax_core.ring_attention, causal=case.causal, platform=platform), inputs)


def sdpa(backend: SDPBackend, case: Case, inputs: Inputs) -> Prepared:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    return through_torch(attention, inputs, lambda x: x.transpose(1, 2))


def flex(case: Case, inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # with a few more shapes in its cache, a function would be compiled for dynamic shapes, which is slower
    compiled = torch.compile(flex_attention, dynamic=False)
    device = inputs.query.device.type
    mask = create_block_mask(visible_causal, None, None, case.length, case.length, device) if case.causal else None
    attention = partial(compiled, block_mask=mask, enable_gqa=case.heads != case.kv_heads)
    return through_torch(attention, inputs, lambda x: x.transpose(1, 2).contiguous())


def visible_causal(batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, k_index: torch.Tensor) -> torch.Tensor:
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
