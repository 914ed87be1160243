"""The two functions of flash-attn that ring-flash-attention builds on, over the same kernels as torch carries them.

flash-attn itself need not be installed: torch has FlashAttention-2's kernels, under names and signatures of its own.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch


@cache
def zigzag_function() -> Any:
    """``zigzag_ring_flash_attn_func`` of the installed ring-flash-attention, unchanged.

    Its package imports more than that at its top (adapters for one range of versions of transformers), so the package is entered
    by its path and only the module that is needed, with what it imports, runs.
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
    sys.modules |= {"ring_flash_attn": package, "flash_attn": flash_attn, "flash_attn.flash_attn_interface": interface}
    return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    _refuse(dropout_p, softcap, alibi_slopes)
    lengths = q.shape[1], k.shape[1]
    window = _window(window_size_left, window_size_right)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, *lengths, 0.0, causal, False, scale=softmax_scale, **window
    )
    return out, lse, None, None


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    """Writes into dq, dk, dv, as flash-attn does; torch's own operator returns new tensors, so this costs a copy of each."""
    _refuse(dropout_p, softcap, alibi_slopes)
    lengths, random = (q.shape[1], k.shape[1]), _no_random_state(q.device)
    window = _window(window_size_left, window_size_right)
    operands = dout, q, k, v, out, softmax_lse, None, None
    gradients = torch.ops.aten._flash_attention_backward(*operands, *lengths, 0.0, causal, *random, scale=softmax_scale, **window)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient)


def _refuse(dropout_p, softcap, alibi_slopes) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("only plain attention is passed on to torch")


def _window(left: int, right: int) -> dict[str, int]:
    sides = {"window_size_left": left, "window_size_right": right}
    return {name: side for name, side in sides.items() if side >= 0}


@cache
def _no_random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of no use without dropout, but the operator wants it."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)
