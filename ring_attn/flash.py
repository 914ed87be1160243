"""The functions of flash-attn 2 and of ring-flash-attention 0.1.8 under their names, over a ring: change the import.

All take ``group``: a ProcessGroup, or whatever ``mesh`` of :func:`ring_attn.ring_attention` may be; None is the default group (a
ring of one without ``torch.distributed``), "local" no ring. Tensors are this rank's shards, of equal shapes on all ranks. What the
names decide is how the sequence is laid out, and whose ``cu_seqlens`` is passed:

- ``flash_attn_*``: contiguous shards; ``cu_seqlens`` are those of the whole sequence. On a ring of one this is flash-attn.
- ``ring_``, ``zigzag_ring_``, ``stripe_flash_attn_*``: contiguous, zigzag, striped. In the varlen forms each document is laid out
  like that by itself, and ``cu_seqlens`` are the local ones: those of the whole sequence divided by the size of the ring.
- ``llama3_flash_attn_varlen_*``: contiguous shards of the whole sequence, and the rank's own ``cu_seqlens``, as
  ``llama3_flash_attn_prepare_cu_seqlens`` returns them.

Without ``varlen`` q, k and v are ``[batch, seq, heads, dim]``; with it ``[tokens, heads, dim]``, packed documents. The ``kvpacked``
functions take ``kv [..., 2, heads, dim]`` in the place of k and v, the ``qkvpacked`` ones ``qkv [..., 3, heads, dim]``.

The arguments mean what they mean there: ``softcap=0.0`` is none, ``window_size=(-1, -1)`` is none, causal masks, windows and ALiBi
count from the last key where queries and keys differ in length. float32 and float64 are taken as well. Differences:

- ``return_attn_probs=True`` returns ``(out, softmax_lse, None)``: nobody has the weights. The LSE is ``[batch, heads, seq]``, or
  ``[heads, tokens]`` in the varlen forms, ``-inf`` where a query sees no key (flash-attn: ``inf``), and differentiable.
- ``deterministic=True`` takes kernels whose sums have one order, and is refused where there is none.
- Windows, ``causal=False`` in zigzag and dropout are computed, not refused or got wrong. Dropout's seed is drawn from torch's
  generator in each call: seed it alike on all ranks to drop what one process would.
- ``softcap`` of the ``ring_``, ``zigzag_ring_``, ``stripe_`` and ``llama3_`` functions is keyword-only: there they have none.
- Slopes for each document (``alibi_slopes [batch, heads]`` in a varlen form) and a ``block_table`` raise NotImplementedError.
"""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jax_core.masks.layout import shard_multiple
from ring_attn.arguments.documents import ids_by_document, rank_in
from ring_attn.documents.cumulative import check_cumulative, documents_of, require
from ring_attn.functional import ring_attention
from torch_bridge.mesh.rings import MeshLike

Result = Tensor | tuple[Tensor, Tensor, None]
Window = tuple[int, int]
Prepared = tuple[Tensor, Tensor, int, int, slice]


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
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, group
    return _attend(q, k, v, *options, bottom_right=True)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    group: MeshLike = None,
) -> Result:
    """flash-attn's function over a ring whose ranks hold contiguous shards of the tokens: ``q [tokens, heads, dim]``, ``k`` and
    ``v [tokens, kv_heads, dim]``; ``cu_seqlens_q`` and ``cu_seqlens_k [documents + 1]`` are those of the whole sequence, the same
    on all ranks. See :mod:`ring_attn.flash`."""
    if block_table is not None:
        raise NotImplementedError("a block_table pages a K/V cache, which a ring does not have; pass keys and values as tensors")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, group
    documents: dict[str, Any] = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    return _attend(q, k, v, *options, qkv_format="thd", bottom_right=True, **documents)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
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
    """:func:`flash_attn_varlen_func` with ``qkv [tokens, 3, heads, dim]`` and one ``cu_seqlens [documents + 1]``."""
    q, k, v = _unpacked("qkv", qkv, 3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, group=group)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int, world_size: int) -> Prepared:
    """What ``llama3_flash_attn_varlen_func`` needs to know about this rank's shard.

    ``cu_seqlens [documents + 1]``: those of the whole sequence, whose length must be divisible by ``world_size``. Returns
    ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``: the documents in the shard's queries; those in the
    keys that they may see, from the start of the first document, to the shard's end if causal, or else to the end of the last one;
    and where those keys are in the whole sequence. Waits for a GPU.
    """
    ends = cu_seqlens.tolist()
    total = ends[-1]
    if total % world_size:
        raise ValueError(f"the sequence's length must be divisible by the size of the ring, got {total} and {world_size}")
    low, high = total // world_size * rank, total // world_size * (rank + 1)
    inside = [(start, stop) for start, stop in pairwise(ends) if start < high and stop > low]
    queries = [low] + [min(stop, high) for _, stop in inside]
    keys = [inside[0][0] if inside else low] + [min(stop, high) if causal else stop for _, stop in inside]
    q, k = ([end - side[0] for end in side] for side in (queries, keys))
    longest_q, longest_k = (max((b - a for a, b in pairwise(side)), default=0) for side in (q, k))
    return cu_seqlens.new_tensor(q), cu_seqlens.new_tensor(k), longest_q, longest_k, slice(keys[0], keys[-1])


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
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
    """Attention within documents over contiguous shards of all tokens: ``q [tokens, heads, dim]``, ``k`` and ``v [tokens, kv_heads,
    dim]``.

    ``cu_seqlens_q`` to ``max_seqlen_k`` and ``local_k_slice``: from :func:`llama3_flash_attn_prepare_cu_seqlens`.
    ``heads_k_stride``, how many K/V heads to gather at a time, must divide their number, and has no effect: there K/V of all ranks
    are gathered, here they go round the ring like all others, so no rank ever holds more than three shards of them.
    """
    if heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise ValueError(f"heads_k_stride must divide the number of K/V heads, {k.shape[1]}, got {heads_k_stride}")
    _check_local_documents(q, k, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), local_k_slice, group)
    document = documents_of(torch.arange(q.shape[0], dtype=cu_seqlens_q.dtype, device=q.device), cu_seqlens_q)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, group
    # Where its document starts in the whole sequence: a number that all ranks give to a document.
    return _attend(q, k, v, *options, qkv_format="thd", q_segment_ids=local_k_slice.start + cu_seqlens_k[document])


def _check_local_documents(
    q: Tensor, k: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], keys: slice, group: MeshLike
) -> None:
    """That the documents are those of this rank's shard: from their second on they start at one place on both sides, and so the
    queries' last ends within the keys'."""
    start, (cu_q, cu_k) = rank_in(group, q.device)[0] * q.shape[0], ends
    if k.shape[0] != q.shape[0] or cu_q.shape != cu_k.shape:
        raise ValueError(
            "queries and keys must be shards of one length with as many documents, got "
            f"{q.shape[0]} and {k.shape[0]} tokens, {len(cu_q) - 1} and {len(cu_k) - 1} documents"
        )
    check_cumulative("cu_seqlens_q", cu_q, q.shape[0], q.device, longest[0])
    check_cumulative("cu_seqlens_k", cu_k, keys.stop - keys.start, q.device, longest[1])
    apart = start + cu_q - (keys.start + cu_k)
    good = (apart[1:-1] == 0).all() & (apart[0] >= 0) & (apart[-1] <= 0) & (cu_q[-1] == q.shape[0])
    must = "cu_seqlens_q, cu_seqlens_k and local_k_slice must be those of this rank (llama3_flash_attn_prepare_cu_seqlens)"
    require(good, must, cu_q, cu_k, keys, f"tokens from {start}")


def _in_layout(name: str, layout: str) -> Callable[..., Result]:
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
        options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, group
        return _attend(q, k, v, *options, bottom_right=True, layout=layout)

    document = f"ring-flash-attention's function: attention over {layout} shards; see :mod:`ring_attn.flash`."
    return _named(function, name, document)


def _varlen_in_layout(name: str, layout: str) -> Callable[..., Result]:
    chunks = shard_multiple(layout)

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
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
        check_cumulative("cu_seqlens", cu_seqlens, q.shape[0], q.device, max_seqlen)
        if chunks > 1:
            must = f"{name} needs documents whose local length is divisible by {chunks}: the two chunks that a rank holds of each"
            require((cu_seqlens % chunks == 0).all(), must, cu_seqlens)
        options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, group
        ids: dict[str, Any] = ids_by_document(layout, cu_seqlens, q.shape[0], group)
        return _attend(q, k, v, *options, qkv_format="thd", **ids)

    document = (
        f"Attention within documents, each laid out over the ring by itself ({layout}); ``cu_seqlens`` are those of this rank's "
        "tokens, the same on all ranks. See :mod:`ring_attn.flash`."
    )
    return _named(function, name, document)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    group: MeshLike,
    **options: Any,
) -> Result:
    """flash-attn's arguments as those of :func:`ring_attention`, of which ``options`` are more."""
    if "qkv_format" in options and alibi_slopes is not None and alibi_slopes.ndim != 1:
        raise NotImplementedError("packed documents share one batch entry: alibi_slopes must be [heads], not one row a document")
    window = None if tuple(window_size) == (-1, -1) else tuple(window_size)
    options |= dict(mesh=group, causal=causal, sliding_window=window, dropout_p=dropout_p, deterministic=deterministic)
    options |= dict(scale=softmax_scale, softcap=softcap or None, alibi_slopes=alibi_slopes)
    if not return_attn_probs:
        return ring_attention(q, k, v, **options)
    out, lse = ring_attention(q, k, v, return_lse=True, **options)
    return out, lse, None


def _qkvpacked(function: Callable[..., Result]) -> Callable[..., Result]:
    def packed(qkv: Tensor, *arguments: object, **options: object) -> Result:
        return function(*_unpacked("qkv", qkv, 3), *arguments, **options)

    return _of_packed(packed, function, "qkvpacked", "qkv")


def _kvpacked(function: Callable[..., Result]) -> Callable[..., Result]:
    def packed(q: Tensor, kv: Tensor, *arguments: object, **options: object) -> Result:
        return function(q, *_unpacked("kv", kv, 2), *arguments, **options)

    return _of_packed(packed, function, "kvpacked", "q", "kv")


def _unpacked(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.ndim < 4 or packed.shape[-3] != count:
        got = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name} must be [..., {count}, heads, dim], got {got}")
    return packed.unbind(-3)


def _of_packed(packed: Callable[..., Result], function: Callable[..., Result], infix: str, *tensors: str) -> Callable[..., Result]:
    """With the signature of ``function``, but these tensors in the place of q, k and v."""
    signature = inspect.signature(function)
    first = [inspect.Parameter(tensor, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for tensor in tensors]
    packed.__signature__ = signature.replace(parameters=[*first, *list(signature.parameters.values())[3:]])  # type: ignore[attr-defined]
    document = f":func:`{function.__name__}` with {' and '.join(f'``{tensor}``' for tensor in tensors)}."
    return _named(packed, function.__name__.removesuffix("func") + infix + "_func", document)


def _named(function: Callable[..., Result], name: str, document: str) -> Callable[..., Result]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = document
    return function


ring_flash_attn_func = _in_layout("ring_flash_attn_func", "contiguous")
zigzag_ring_flash_attn_func = _in_layout("zigzag_ring_flash_attn_func", "zigzag")
stripe_flash_attn_func = _in_layout("stripe_flash_attn_func", "striped")
ring_flash_attn_varlen_func = _varlen_in_layout("ring_flash_attn_varlen_func", "contiguous")
zigzag_ring_flash_attn_varlen_func = _varlen_in_layout("zigzag_ring_flash_attn_varlen_func", "zigzag")
stripe_flash_attn_varlen_func = _varlen_in_layout("stripe_flash_attn_varlen_func", "striped")

flash_attn_kvpacked_func = _kvpacked(flash_attn_func)
flash_attn_qkvpacked_func = _qkvpacked(flash_attn_func)
flash_attn_varlen_kvpacked_func = _kvpacked(flash_attn_varlen_func)
llama3_flash_attn_varlen_kvpacked_func = _kvpacked(llama3_flash_attn_varlen_func)
llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(llama3_flash_attn_varlen_func)
ring_flash_attn_kvpacked_func = _kvpacked(ring_flash_attn_func)
ring_flash_attn_qkvpacked_func = _qkvpacked(ring_flash_attn_func)
ring_flash_attn_varlen_kvpacked_func = _kvpacked(ring_flash_attn_varlen_func)
ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(ring_flash_attn_varlen_func)
stripe_flash_attn_kvpacked_func = _kvpacked(stripe_flash_attn_func)
stripe_flash_attn_qkvpacked_func = _qkvpacked(stripe_flash_attn_func)
stripe_flash_attn_varlen_kvpacked_func = _kvpacked(stripe_flash_attn_varlen_func)
stripe_flash_attn_varlen_qkvpacked_func = _qkvpacked(stripe_flash_attn_varlen_func)
zigzag_ring_flash_attn_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_varlen_func)

__all__ = [name for name, function in list(globals().items()) if name.endswith(("_func", "prepare_cu_seqlens"))]
