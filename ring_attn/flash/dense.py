"""The functions for batches of sequences of one length, ``[batch, seq, heads, dim]``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ring_attn.flash.arguments import Result, Window, attend, kvpacked, qkvpacked
from torch_bridge.job.mesh import MeshLike


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: MeshLike = None,
) -> Result:
    """flash-attn's function over a ring whose ranks hold contiguous shards: ``q [batch, seq, heads, dim]``, ``k`` and ``v [batch,
    seq, kv_heads, dim]``, ``alibi_slopes [heads]`` or ``[batch, heads]``; see :mod:`ring_attn.flash`."""
    return attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        group=group,
        bottom_right=True,
    )


def _in_layout(name: str, layout: str) -> Callable[..., Any]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: MeshLike = None,
        *,
        softcap: float = 0.0,
    ) -> Result:
        return attend(
            q,
            k,
            v,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
            group=group,
            bottom_right=True,
            layout=layout,
        )

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"ring-flash-attention's function: attention over {layout} shards; see :mod:`ring_attn.flash`."
    return function


ring_flash_attn_func = _in_layout("ring_flash_attn_func", "contiguous")
zigzag_ring_flash_attn_func = _in_layout("zigzag_ring_flash_attn_func", "zigzag")
stripe_flash_attn_func = _in_layout("stripe_flash_attn_func", "striped")

flash_attn_kvpacked_func = kvpacked(flash_attn_func)
flash_attn_qkvpacked_func = qkvpacked(flash_attn_func)
ring_flash_attn_kvpacked_func = kvpacked(ring_flash_attn_func)
ring_flash_attn_qkvpacked_func = qkvpacked(ring_flash_attn_func)
zigzag_ring_flash_attn_kvpacked_func = kvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_func)
stripe_flash_attn_kvpacked_func = kvpacked(stripe_flash_attn_func)
stripe_flash_attn_qkvpacked_func = qkvpacked(stripe_flash_attn_func)
