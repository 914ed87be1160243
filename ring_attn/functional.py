"""``ring_attention`` for torch tensors: this rank's shards in, this rank's shard out."""

from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.announced import announced

_FORMATS = ("bshd", "bhsd")


@announced(lambda *_, mesh=None, mesh_dim=None, **__: (mesh, mesh_dim))
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    mesh_dim: str | int | None = None,
    layout: str = "contiguous",
    qkv_format: str = "bshd",
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_mod: Callable | None = None,
    mask_builder: Callable | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    q_position_ids: torch.Tensor | None = None,
    kv_position_ids: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    fused_backward: bool = False,
    platform: str = "auto",
    cfg: Any = None,
) -> Any:  # a Tensor, with return_lse two: a union would have every caller tell them apart
    """Exact attention over a sequence sharded across processes; differentiable in q, k, v, bias, sinks, slopes and the LSE.

    Every rank of the ring calls it with its shards, of equal shapes on all ranks; K/V travel round the ring. The first call of a
    job with several processes starts JAX on all of them: every process of the job must make one.

    Args:
        q: ``[batch, seq, heads, dim]`` (``bshd``) or ``[batch, heads, seq, dim]`` (``bhsd``); float16, bfloat16, float32, float64.
        k, v: likewise, with ``kv_heads`` that divide ``heads``; v may have its own head dim. Their length may differ from q's.
        mesh: the ring: a ``DeviceMesh`` (1-D, or n-D with ``mesh_dim`` naming the dimension), a ``ProcessGroup``, None for the
            default process group (a ring of one where ``torch.distributed`` is not initialised), or "local": no ring, the whole
            sequence is here. On an XLA device: a mesh of torch-xla, and tensors are whole (docs/torch_xla.md).
        layout: "contiguous", "zigzag" or "striped": which positions this rank holds (``ring_attn.shard``).
        causal: key position <= query position. Positions are those in the whole sequence; with fewer queries than keys query 0
            stands at position 0.
        scale: of the scores, ``1 / sqrt(dim)`` by default. softcap: ``softcap * tanh(x / softcap)`` of the scaled scores.
        sliding_window: ``q - left <= k <= q + right``, an int for both sides, -1 or None for no bound.
        chunk_size: Llama-4's chunked attention (causal within a chunk).
        bias: float, broadcasts to ``[batch, heads, seq of this shard, whole key sequence]``: rows in shard order, columns in the
            sequence's own order. mask: bool (True: may attend), likewise.
        mask_mod: ``(batch, head, q_pos, k_pos) -> bool``, traced by JAX on each call: operators only; it may close over JAX
            or NumPy-made JAX arrays, whose values may change. Keep one function object: a new one compiles anew. mask_builder:
            as in :func:`jax_core.ring_attention`, called once for each function object and shape.
        sinks: ``[heads]``, ``[n]`` (shared by all heads) or ``[heads, n]`` logits that join the softmax's denominator.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``; adds ``-slope * abs(q - k)``.
        q_segment_ids, kv_segment_ids: ints ``[batch, seq]`` or ``[seq]``; attention stays within equal ids, negative is padding.
        q_position_ids, kv_position_ids: ints, likewise; positions in place of the layout's. One side is enough for
            self-attention.
        dropout_p: probability that an attention weight is dropped. dropout_seed: an int (any 64 bits) or a tensor of one; None
            draws it from torch's default generator. The pattern depends on seed, batch, head and positions alone: with one seed on
            all ranks it is the same whatever the ring and the layout.
        return_lse: also return ``lse [batch, heads, seq]`` (whatever ``qkv_format``), natural logarithm, float32 (float64 for
            float64 inputs), ``-inf`` where a row saw no key. Differentiable.
        fused_backward: True demands dQ, dK and dV in one sweep over the scores: faster where memory is slow, and with Triton no
            longer the same bits in every run.
        platform, cfg: the kernel and its settings, as in :func:`jax_core.ring_attention`.

    Returns:
        The output in q's dtype and format; a row that sees no key gives 0. The gradient of an operand that all ranks hold (sinks,
        slopes) is this rank's part, to be summed over the ring like that of every other parameter.

    Raises:
        ValueError: inputs that do not fit together, here or on another rank of the ring. NotImplementedError: the named platform
            cannot compute this.
        torch_bridge.runtime.PeerFailure: another process of the ring died, stopped, or calls something else.
    """
    _check_tensors(dict(q=q, k=k, v=v, bias=bias, mask=mask, sinks=sinks, alibi_slopes=alibi_slopes), q)
    _check_numbers(dict(scale=scale, softcap=softcap, dropout_p=dropout_p))
    if qkv_format not in _FORMATS:
        raise ValueError(f"qkv_format must be one of {', '.join(_FORMATS)}; got {qkv_format!r}")
    if qkv_format == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ids = dict(
        q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, q_position_ids=q_position_ids, kv_position_ids=kv_position_ids
    )
    _check_tensors(ids, q)
    out, lse = _road(q.device)(
        (mesh, mesh_dim),
        dict(query=q, key=k, value=v, softmax_aux=sinks, bias=bias, mask=mask, alibi_slopes=alibi_slopes, **ids),
        dropout_seed=_seed(dropout_p, dropout_seed),
        causal=causal,
        sliding_window=tuple(sliding_window) if isinstance(sliding_window, list) else sliding_window,
        chunk_size=chunk_size,
        logits_soft_cap=softcap,
        softmax_scale=scale,
        dropout_prob=dropout_p,
        layout=layout,
        mask_mod=mask_mod,
        mask_builder=mask_builder,
        platform=platform,
        cfg=cfg,
        fused_backward=fused_backward,
        lse_gradient=return_lse,
    )
    out = out.transpose(1, 2) if qkv_format == "bhsd" else out
    return (out, lse) if return_lse else out


def _road(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The way of a device's tensors into JAX; imported here, so that importing ring_attn loads no jax, torch-xla or torch-tpu."""
    if device.type == "tpu":
        from torch_bridge.torch_tpu import attend
    elif device.type == "xla":
        from torch_bridge.torch_xla import attend
    else:
        from torch_bridge.autograd import attend
    return attend


def _check_tensors(tensors: dict[str, torch.Tensor | None], q: torch.Tensor) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if name in ("q", "k", "v") and x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, seq, heads, dim in the order of qkv_format), got {list(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"all tensors must be on one device: q is on {q.device}, {name} on {x.device}; move it with .to()")
        if x.dtype == torch.float64 != q.dtype:
            raise ValueError(f"{name} may be float64 only where q is: q is {q.dtype}; cast it with .to(q.dtype)")


def _check_numbers(numbers: dict[str, Any]) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(
                f"{name} must be a Python number, which is compiled in and has no gradient; got {type(value).__name__}; take "
                ".item() of a tensor, or multiply q by one that is learned"
            )


def _seed(dropout_p: float, seed: int | torch.Tensor | None) -> int | None:
    if seed is None:
        return int(torch.randint(2**63 - 1, ())) if dropout_p else None
    if isinstance(seed, torch.Tensor) and seed.numel() == 1 and not seed.is_floating_point():
        seed = int(seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed must be an int of 64 bits, or an integer tensor of one element; got {seed!r}")
    return seed
