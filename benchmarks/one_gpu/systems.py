"""The systems of the programs of one GPU: this library and its peers, each as it is meant to be called.

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

import ring_attn
from benchmarks.harness import systems
from benchmarks.harness.systems import Case, Inputs, Prepared, through_jax, through_torch


def ours(platform: str, case: Case, inputs: Inputs, **more: Any) -> Prepared:
    options: dict[str, Any] = dict(causal=case.causal, mesh="local", softcap=case.softcap, **more)
    if case.window is not None:
        options["sliding_window"] = (case.window - 1, 0)  # the token itself and those before it
    if case.sinks:
        options["sinks"] = sinks_of(case, inputs)
    if not case.documents:
        return systems.ours(platform, inputs, **options)
    options |= dict(
        qkv_format="thd", cu_seqlens_q=starts(case, inputs), max_seqlen_q=max(case.documents), platform=platform, padding=False
    )
    return through_torch(lambda *qkv: ring_attn.ring_attention(*(x[0] for x in qkv), **options)[None], inputs)


def by_segment_ids(platform: str, case: Case, inputs: Inputs) -> Prepared:
    """Documents as any segments: blocks are visited by lists."""
    if not case.documents:
        raise NotImplementedError("without documents nothing differs")
    return systems.ours(platform, inputs, causal=case.causal, mesh="local", q_segment_ids=document_numbers(case, inputs)[None])


def sinks_of(case: Case, inputs: Inputs) -> torch.Tensor:
    return torch.ones(case.heads, device=inputs.query.device, dtype=inputs.query.dtype)


def ours_in_jax(platform: str, case: Case, inputs: Inputs) -> Prepared:
    import jax_core

    only_plain(case)
    return through_jax(partial(jax_core.ring_attention, causal=case.causal, platform=platform), inputs)


def starts(case: Case, inputs: Inputs) -> torch.Tensor:
    """``cu_seqlens``"""
    return F.pad(torch.tensor(case.documents, device=inputs.query.device).cumsum(0), (1, 0)).to(torch.int32)


def document_numbers(case: Case, inputs: Inputs) -> torch.Tensor:
    lengths = torch.tensor(case.documents, device=inputs.query.device)
    return torch.arange(len(lengths), dtype=torch.int32, device=inputs.query.device).repeat_interleave(lengths)


def only_plain(case: Case) -> None:
    if case.window is not None or case.documents or case.softcap is not None or case.sinks:
        raise NotImplementedError("measured here without windows, documents, soft cap and sinks only")


def sdpa(backend: SDPBackend, case: Case, inputs: Inputs) -> Prepared:
    only_plain(case)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    return through_torch(attention, inputs, lambda x: x.transpose(1, 2))


def flash_attn_4(case: Case, inputs: Inputs) -> Prepared:
    """flash-attn-4's own functions of torch, on Hopper and later. It packs documents as a batch of variable lengths."""
    interface = import_module("flash_attn.cute.interface")
    options: dict[str, Any] = dict(causal=case.causal, softcap=case.softcap or 0.0)
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    if case.sinks:
        options["learnable_sink"] = sinks_of(case, inputs)
    if not case.documents:
        return through_torch(lambda *qkv: alone(interface.flash_attn_func(*qkv, **options)), inputs)
    bounds = starts(case, inputs)
    options |= dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=max(case.documents), max_seqlen_k=max(case.documents))

    def packed(*qkv: torch.Tensor) -> torch.Tensor:
        return alone(interface.flash_attn_varlen_func(*(x[0] for x in qkv), **options))[None]

    return through_torch(packed, inputs)


def torch_varlen(case: Case, inputs: Inputs) -> Prepared:
    """torch's own attention of packed documents, with the FlashAttention-2 that it has by default."""
    from torch.nn.attention.varlen import varlen_attn

    if not case.documents:
        raise NotImplementedError("measured here with documents only")
    bounds, longest = starts(case, inputs), max(case.documents)
    shared: dict[str, Any] = {} if case.heads == case.kv_heads else dict(enable_gqa=True)  # which older torch does not have
    attention = partial(varlen_attn, cu_seq_q=bounds, cu_seq_k=bounds, max_q=longest, max_k=longest, window_size=(-1, 0), **shared)
    return through_torch(lambda *qkv: alone(attention(*(x[0] for x in qkv)))[None], inputs)


def alone(result: Any) -> torch.Tensor:
    """The output, of a function that may return the LSE too."""
    return result[0] if isinstance(result, tuple) else result


def flex(case: Case, inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # with a few more shapes in its cache, a function would be compiled for dynamic shapes, which is slower
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    visible, device = visibility(case, inputs), inputs.query.device.type
    mask = None if visible is None else create_block_mask(visible, None, None, case.length, case.length, device)
    options: dict[str, Any] = dict(block_mask=mask, enable_gqa=case.heads != case.kv_heads)
    if case.softcap is not None:
        cap = case.softcap
        options["score_mod"] = lambda score, b, h, q, k: cap * torch.tanh(score / cap)
    if not case.sinks:
        return through_torch(partial(compiled, **options), inputs, lambda x: x.transpose(1, 2).contiguous())
    sinks = sinks_of(case, inputs)[:, None]

    def with_sinks(*qkv: torch.Tensor) -> torch.Tensor:
        """By its LSE, as transformers does it."""
        out, lse = compiled(*qkv, return_lse=True, **options)
        return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)

    return through_torch(with_sinks, inputs, lambda x: x.transpose(1, 2).contiguous())


Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of batch, head, query, key


def visibility(case: Case, inputs: Inputs) -> Visible | None:
    """As FlexAttention takes it; None if every query sees every key."""
    if case.documents:
        numbers = document_numbers(case, inputs)
        return lambda b, h, q, k: (q >= k) & (numbers[q] == numbers[k])
    if case.window is not None:
        window = case.window
        return lambda b, h, q, k: (q >= k) & (q - k < window)
    return (lambda b, h, q, k: q >= k) if case.causal else None


def jax_cudnn(case: Case, inputs: Inputs) -> Prepared:
    import jax

    only_plain(case)
    return through_jax(partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn"), inputs)


def ejkernel(case: Case, inputs: Inputs) -> Prepared:
    only_plain(case)
    attention = import_module("ejkernel.kernels._triton.flash_attention").flash_attention
    return through_jax(partial(attention, causal=case.causal), inputs)


PLATFORMS = ("cute", "cuda", "triton")
SYSTEMS: dict[str, Callable[[Case, Inputs], Prepared]] = {
    "flash-attn-4": flash_attn_4,
    "cuDNN (SDPA)": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    **{name: partial(ours, name) for name in PLATFORMS},
    **{f"{name}, in JAX": partial(ours_in_jax, name) for name in PLATFORMS},
    "auto": partial(ours, "auto"),
    "cute, segment ids": partial(by_segment_ids, "cute"),
    "cute, deterministic": partial(ours, "cute", deterministic=True),
    "xla": partial(ours, "xla"),
    "FlexAttention": flex,
    "varlen_attn": torch_varlen,
    "FlashAttention-2 (SDPA)": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "cuDNN (jax.nn)": jax_cudnn,
    "ejkernel Triton": ejkernel,
}
