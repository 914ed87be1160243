"""The two functions of flash-attn that ring-flash-attention builds on, implemented with the same kernels as shipped in torch.

flash-attn itself need not be installed: torch has FlashAttention-2's kernels, under its own names and signatures.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@cache
def zigzag_function() -> Any:
    """``zigzag_ring_flash_attn_func`` of the installed ring-flash-attention, unchanged.

    Its package imports more than that at the top (adapters for certain versions of transformers), so only the needed module is
    loaded, by its path, with what that module imports.
    """
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None or not found.submodule_search_locations:
        raise ImportError("ring-flash-attn is not installed")
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(found.submodule_search_locations)
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    flash_attn = ModuleType("flash_attn")
    flash_attn.__path__ = []
    vars(flash_attn).update(__version__="2.6.0", flash_attn_interface=interface)
    stand_ins = {"flash_attn": flash_attn, "flash_attn.flash_attn_interface": interface}
    installed = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules |= {"ring_flash_attn": package, **stand_ins}
    try:
        return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    finally:  # flash_attn is again what is installed under that name: flash-attn-4
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
