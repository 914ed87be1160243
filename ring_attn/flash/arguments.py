"""flash-attn's arguments as those of ``ring_attention``, and the packed forms of a function."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ring_attn.functional import ring_attention
from torch_bridge.job.mesh import MeshLike

Result = Tensor | tuple[Tensor, Tensor, None]
Window = tuple[int, int]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    group: MeshLike,
    **more: Any,
) -> Result:
    """``q [batch, seq, heads, dim]``, or ``[tokens, heads, dim]`` with ``qkv_format="thd"`` in ``more``: further arguments of
    :func:`ring_attention`."""
    options = dict(
        mesh=group,
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        sliding_window=None if tuple(window_size) == (-1, -1) else tuple(window_size),
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        **more,
    )
    if not return_attn_probs:
        return ring_attention(q, k, v, **options)
    out, lse = ring_attention(q, k, v, return_lse=True, **options)
    return out, lse, None


def qkvpacked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with ``qkv [..., 3, heads, dim]`` instead of q, k and v."""

    def packed(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
        _check_packed("qkv", qkv, 3)
        return function(*qkv.unbind(-3), *arguments, **options)

    return _described(packed, function, "qkvpacked", ["qkv"])


def kvpacked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with ``kv [..., 2, heads, dim]`` instead of k and v."""

    def packed(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
        _check_packed("kv", kv, 2)
        return function(q, *kv.unbind(-3), *arguments, **options)

    return _described(packed, function, "kvpacked", ["q", "kv"])


def _check_packed(name: str, packed: Tensor, count: int) -> None:
    if not isinstance(packed, Tensor) or packed.ndim < 4 or packed.shape[-3] != count:
        got = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name} must be [..., {count}, heads, dim], got {got}")


def _described(packed: Callable[..., Any], function: Callable[..., Any], form: str, tensors: list[str]) -> Callable[..., Any]:
    name = function.__name__.removesuffix("func") + form + "_func"
    signature = inspect.signature(function)
    first = [inspect.Parameter(tensor, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for tensor in tensors]
    packed.__name__ = packed.__qualname__ = name
    packed.__module__ = function.__module__
    packed.__doc__ = f":func:`{function.__name__}` with {' and '.join(f'``{tensor}``' for tensor in tensors)}."
    packed.__signature__ = signature.replace(parameters=[*first, *list(signature.parameters.values())[3:]])  # type: ignore[attr-defined]
    return packed
