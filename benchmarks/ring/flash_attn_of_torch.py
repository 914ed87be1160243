"""The two functions of flash-attn that ring-flash-attention and yunchang build on, implemented with the same kernels as shipped in
torch.

flash-attn itself need not be installed: torch has FlashAttention-2's kernels, under its own names and signatures.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def zigzag_function() -> Any:
    """``zigzag_ring_flash_attn_func`` of the installed ring-flash-attention, unchanged."""
    return ring_flash_attn("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func


@cache
def ring_flash_attn(module: str) -> Any:
    """A module of the installed ring-flash-attention, unchanged.

    Its package imports more than that at the top (adapters for certain versions of transformers), so only the needed module is
    loaded, by its path, with what that module imports.
    """
    _find_ring_flash_attn()
    with _stand_ins(_flash_attn_backward):
        return importlib.import_module(f"ring_flash_attn.{module}")


@cache
def _find_ring_flash_attn() -> None:
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None or not found.submodule_search_locations:
        raise ImportError("ring-flash-attn is not installed")
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["ring_flash_attn"] = package


@cache
def yunchang() -> Any:
    """The installed yunchang, unchanged, on the same kernels."""
    with _stand_ins(_backward_by_place):
        return importlib.import_module("yunchang")


@contextmanager
def _stand_ins(backward: Callable[..., None]) -> Iterator[None]:
    """``flash_attn`` is this module; afterwards it is again what is installed under that name, flash-attn-4."""
    interface, flash_attn = ModuleType("flash_attn.flash_attn_interface"), ModuleType("flash_attn")
    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=backward)
    flash_attn.__path__ = []
    vars(flash_attn).update(__version__="2.6.3", flash_attn_interface=interface)
    varlen: dict[str, Any] = {"_flash_attn_varlen_forward": _varlen_forward, "_flash_attn_varlen_backward": _varlen_backward}
    vars(interface).update(varlen)
    vars(flash_attn).update(flash_attn_func=None)  # yunchang imports it for what is not measured here
    stand_ins = {"flash_attn": flash_attn, "flash_attn.flash_attn_interface": interface}
    installed = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules |= stand_ins
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules |= installed


# Both are called with keyword arguments: those named here, their defaults, and those that must stay "off".
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size_left=-1, window_size_right=-1, **off
) -> tuple[Tensor, Tensor, None, None]:
    settings = _settings(softmax_scale, window_size_left, window_size_right, off)
    operands = q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*operands, **settings)
    return out, lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    softmax_scale: float, causal: bool, window_size_left=-1, window_size_right=-1, deterministic=False, **off
) -> None:  # fmt: skip
    """Writes into dq, dk, dv, as flash-attn does. torch's operator returns new tensors, so this costs a copy of each."""
    settings = _settings(softmax_scale, window_size_left, window_size_right, off)
    operands = dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *_no_random_state(q.device)
    gradients = torch.ops.aten._flash_attention_backward(*operands, **settings)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size_left=-1, window_size_right=-1, **off
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    settings = _settings(softmax_scale, window_size_left, window_size_right, off)
    operands = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*operands, **settings)
    return out, lse, None, None


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size_left=-1, window_size_right=-1, deterministic=False, **off
) -> None:  # fmt: skip
    settings = _settings(softmax_scale, window_size_left, window_size_right, off)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    operands = dout, q, k, v, out, softmax_lse, *lengths, 0.0, causal, *_no_random_state(q.device)
    gradients = torch.ops.aten._flash_attention_backward(*operands, **settings)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient)


def _backward_by_place(*operands: Any) -> None:
    """With all arguments in flash-attn's order: nine tensors, dropout_p, scale, causal, both sides of the window, and the rest."""
    *tensors, dropout_p, scale, causal, left, right, softcap, slopes, deterministic, _ = operands
    off = dict(dropout_p=dropout_p, softcap=softcap, alibi_slopes=slopes, deterministic=deterministic)
    windows = dict(window_size_left=left, window_size_right=right)
    named: dict[str, Any] = dict(softmax_scale=scale, causal=causal) | windows | off
    _flash_attn_backward(*tensors, **named)


def _settings(scale: float, left: int, right: int, off: dict[str, Any]) -> dict[str, Any]:
    """The settings under torch's names."""
    if any(value is not None and value for value in off.values()):  # dropout, soft cap, ALiBi slopes, ...
        raise NotImplementedError(f"only plain attention is passed on to torch, got {off}")
    window = {"window_size_left": left, "window_size_right": right}
    return {"scale": scale} | {name: side for name, side in window.items() if side >= 0}


@cache
def _no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Unused without dropout, but the operator requires it."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)
