"""``ring_attention`` for torch tensors: this rank's shards in, this rank's shard out."""

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard, Unpack, overload

import torch
from torch import Tensor

from jax_core.config import RingAttentionConfig
from jax_core.masks.layout import Layout
from jax_core.operands import Operands
from jax_core.options import MaskBuilder, MaskMod, Options
from ring_attn.arguments.checks import check_options, check_tensors, plain, plain_options
from ring_attn.arguments.documents import Packing, as_documents, with_documents, with_positions
from ring_attn.arguments.formats import as_given, batch_first, check_format
from ring_attn.arguments.head_groups import grouped, joined
from ring_attn.arguments.names import OF_FUNCTION
from ring_attn.arguments.shards import check_shards
from ring_attn.sharding.padding import check_padding
from torch_bridge.call import call_cache
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.call.sanity_checks import suspect_swapped_dims
from torch_bridge.mesh.rings import MeshArg, MeshDim, MeshLike

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The argument names to use in errors: the core's name, and this function's.
NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "softmax_aux": "sinks",
    "logits_soft_cap": "softcap",
    "softmax_scale": "scale",
    "dropout_prob": "dropout_p",
    "jax_core.RingAttentionConfig": "ring_attn.RingAttentionConfig",
}


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of :func:`ring_attention` except ``return_lse``."""

    mesh: MeshLike
    mesh_dim: MeshDim
    layout: Layout
    qkv_format: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    causal: bool
    bottom_right: bool
    scale: float | None
    sliding_window: int | tuple[int | None, int | None] | None
    chunk_size: int | None
    softcap: float | None
    bias: Tensor | None
    mask: Tensor | None
    mask_mod: MaskMod | None
    mask_builder: MaskBuilder | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    q_position_ids: Tensor | None
    kv_position_ids: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    fused_backward: bool
    padding: bool
    head_groups: int
    deterministic: bool
    platform: str
    strategy: str
    cfg: RingAttentionConfig | None


def _where(
    *tensors: object, mesh: MeshLike = None, mesh_dim: MeshDim = None, qkv_format: str = "bshd", **others: object
) -> MeshArg | None:
    """Mesh and mesh dimension of a call; None where it is so wrong that a mesh may be among its positional arguments."""
    if len(tensors) > 3:
        return None
    query = tensors[0] if tensors else others.get("q")
    if mesh is not None or not is_dtensor(query):
        return mesh, mesh_dim
    from ring_attn.arguments.dtensor import where_sharded

    return where_sharded(query, dim=qkv_format.find("s") if "s" in qkv_format else 0)


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Loads ``torch.distributed.tensor``, which takes a second, only for what may be one."""
    if type(x) in (Tensor, torch.nn.Parameter) or not isinstance(x, Tensor) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@propagates_errors(_where, OF_FUNCTION)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    qkv_format: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    mask_mod: MaskMod | None = None,
    mask_builder: MaskBuilder | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    q_position_ids: Tensor | None = None,
    kv_position_ids: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    fused_backward: bool = False,
    padding: bool = True,
    head_groups: int = 1,
    deterministic: bool = False,
    platform: str = "auto",
    strategy: str = "auto",
    cfg: RingAttentionConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded across processes. Differentiable with respect to q, k, v, bias, sinks and slopes; the
    LSE is a differentiable output.

    Every rank of the ring calls it with its shards, which have the same shapes on all ranks; K/V are sent around the ring. The
    first call in a job with several processes starts JAX on all of them, so every process of the job must make one. Under
    ``torch.autocast`` q, k and v are cast as those of torch's own attention. With DTensors the ring is the mesh dimension that the
    sequence is sharded over (docs/torch.md).

    Args:
        q: ``[batch, seq, heads, dim]`` (``bshd``); float16, bfloat16, float32, float64. With ``qkv_format`` "bhsd" and "sbhd" in
            that order; with "thd" ``[tokens, heads, dim]``: packed documents, without a batch dimension.
        k, v: likewise, with ``kv_heads`` that divide ``heads``; v may have its own head dim. Their length may differ from q's.
        mesh: the ring: a ``DeviceMesh`` (1-D, or n-D with ``mesh_dim`` naming the dimension), a ``ProcessGroup``, None for the
            default process group (a ring of one if ``torch.distributed`` is not initialised), or "local": no ring, the whole
            sequence is on this rank. On an XLA device: a torch-xla mesh, and tensors are whole (docs/contributing/torch_xla.md).
        mesh_dim: a name or an index; or several, as ``("ulysses", "ring")``, for the strategies that send differently along each:
            the sequence is then split over all of them, the first one major (rank ``i0 * n1 + i1``).
        layout: "contiguous", "zigzag", "striped", or a plan of :func:`ring_attn.balance`: which positions this rank holds
            (``ring_attn.shard``). A plan is for queries and keys of its own length.
        cu_seqlens_q, cu_seqlens_k: with "thd", ints ``[documents + 1]``: where the documents of the whole sequence begin and end,
            not of this shard; the same on every rank. Tokens after the last are padding. The keys' may be left out if they are
            the queries'. Positions then count from each document's start. None: one document. max_seqlen_q, max_seqlen_k: nothing
            needs them; a document that is longer is an error.
        causal: key position <= query position. Positions are those in the whole sequence; with fewer queries than keys, query 0
            is at position 0.
        bottom_right: the last query (of each document) is at the last key's position instead, as in flash-attn; also for windows,
            chunks, ALiBi and ``mask_mod``. Lengths count with their padding, but not with padding beyond ``cu_seqlens``.
        scale: factor on the scores, ``1 / sqrt(dim)`` by default. softcap: ``softcap * tanh(x / softcap)`` of the scaled scores.
        sliding_window: ``q - left <= k <= q + right``, an int for both sides, -1 or None for no bound.
        chunk_size: Llama-4's chunked attention (causal within a chunk).
        bias: float, broadcasts to ``[batch, heads, seq of this shard, whole key sequence]``: rows in shard order, columns in the
            sequence's natural order. mask: bool (True: may attend), same shape.
        mask_mod: ``(batch, head, q_pos, k_pos) -> bool``, traced by JAX on each call: operators only; it may close over JAX
            arrays, also ones made from NumPy, whose values may change. Reuse one function object: a new one recompiles.
            mask_builder: as in :func:`jax_core.ring_attention`, called once for each function object and shape.
        sinks: ``[heads]``, ``[n]`` (shared by all heads) or ``[heads, n]`` logits that join the softmax's denominator.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``; adds ``-slope * abs(q - k)``.
        q_segment_ids, kv_segment_ids: ints ``[batch, seq]`` or ``[seq]``; attention stays within equal ids, negative is padding.
        q_position_ids, kv_position_ids: ints of the same shape whose values fit in int32; they replace the layout's positions. With
            them, windows and chunks must be below ``2**31``. One side is enough for self-attention.
        dropout_p: probability that an attention weight is dropped. dropout_seed: an int (any 64 bits) or a one-element tensor; None
            draws it from torch's default generator. The pattern depends only on seed, batch, head and positions: with the same seed
            on all ranks it is the same for every ring and layout.
        return_lse: also return ``lse [batch, heads, seq]`` (whatever ``qkv_format``, but for "thd" ``[heads, tokens]``), natural
            logarithm, float32 (float64 for float64 inputs), ``-inf`` where a row saw no key. Differentiable.
        fused_backward: True computes dQ, dK and dV in one sweep over the scores: faster if memory is slow, but with Triton no
            longer bit-reproducible.
        padding: False says that each token is in a document (no segment id is negative, ``cu_seqlens`` end with the last token),
            which saves clearing what is in none; checked.
        head_groups: in how many groups of K/V heads attention is computed, one after another: what a call needs beside its
            operands and results is then that of a group. The same numbers; without dropout, ``mask_builder`` and DTensors.
        deterministic: True gives the same bits in every run, as does ``torch.use_deterministic_algorithms(True)`` for all calls:
            "auto" then takes a kernel that can (flash-attn-4's, Triton's, XLA's), and a named one that cannot is refused (with
            torch's ``warn_only``, too).
        platform, strategy, cfg: the kernel, how the ranks share the work (docs/strategies.md), and its settings, as in
            :func:`jax_core.ring_attention`. ``cfg`` is a :class:`ring_attn.RingAttentionConfig`.

    Returns:
        The output in q's dtype and format; a row that sees no key gives 0. The gradient of an operand that all ranks hold (sinks,
        slopes) is this rank's part, to be summed over the ring like that of any other parameter. With DTensors it is that of the
        whole, summed already: leave it out of ``sync_gradients``.

    Raises:
        ValueError: inputs that do not fit together, here or on another rank of the ring. NotImplementedError: the given platform or
            strategy cannot compute this.
        torch_bridge.runtime.PeerFailure: another process of the ring died, stopped, or called something else.
    """
    ids = q_segment_ids, kv_segment_ids, q_position_ids, kv_position_ids
    operands = Operands(q, k, v, sinks, bias, mask, *ids, alibi_slopes)
    options = Options(
        causal=causal,
        bottom_right=bottom_right,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        logits_soft_cap=softcap,
        softmax_scale=scale,
        layout=layout,
        mask_mod=mask_mod,
        mask_builder=mask_builder,
        platform=platform,
        strategy=strategy,
        cfg=cfg,
        fused_backward=fused_backward,
        deterministic=deterministic,
        dropout_prob=dropout_p,
        padding=padding,
        lse_gradient=return_lse,
    )
    out, lse = attention(
        NAMES,
        (mesh, mesh_dim),
        operands,
        options,
        dropout_seed=dropout_seed,
        qkv_format=qkv_format,
        packing=_packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        head_groups=head_groups,
    )
    return (out, lse) if return_lse else out


def attention(
    names: Mapping[str, str],
    where: MeshArg,
    operands: Operands[Tensor],
    options: Options,
    *,
    dropout_seed: int | Tensor | None,
    qkv_format: str = "bshd",
    packing: Packing | None = None,
    head_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``. ``names``: the caller's names of operands and options, where they differ from the core's; used in errors."""
    if head_groups != 1:
        of_group = [
            attention(names, where, part, option, dropout_seed=None, qkv_format=qkv_format, packing=packing)
            for part, option in grouped(head_groups, names, operands, qkv_format, options)
        ]
        return joined(of_group, qkv_format)
    key, packed = None, packing is not None and packing.given
    if not packed:
        check_padding(operands, qkv_format, options)
    if not torch.compiler.is_compiling():
        check_shards(where, names, operands, qkv_format, packing, options)
    if not packed:
        operands, options = as_documents(where, operands, options)
    if not torch.compiler.is_compiling():
        key = _key(where, operands, dropout_seed, qkv_format, packing, options)
        repeat = call_cache.lookup(key)
        if repeat is not None:
            out, lse = repeat(_autocast(batch_first(operands, qkv_format)).given)
            return as_given(out, lse, qkv_format)
    return _first(key, names, where, operands, options, dropout_seed, qkv_format, packing if packed else None)


def _first(
    key: Hashable,
    names: Mapping[str, str],
    where: MeshArg,
    operands: Operands[Tensor],
    options: Options,
    dropout_seed: int | Tensor | None,
    qkv_format: str,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """The call with all its checks, remembered by its ``key``, if it has one."""
    check_format(qkv_format)
    check_tensors(operands, names, len(qkv_format))
    options = plain_options(options, deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled())
    check_options(options, names)
    operands = batch_first(operands, qkv_format)
    if qkv_format != "thd":
        suspect_swapped_dims(operands.query, operands.key, qkv_format)
    whole = None
    if any(map(is_dtensor, operands.qkv)):
        from ring_attn.arguments.dtensor import local_parts

        where, operands, whole = local_parts(where, names, operands, options)
    if packing is not None:
        operands, options = with_documents(where, packing, qkv_format, operands, options)
    elif options.bottom_right:
        operands, options = with_positions(where, operands, options)
    # Imported here so that importing ring_attn does not load JAX.
    from torch_bridge.attention.functional import cached_call, differentiable_attention

    seed = _seed(options.dropout_prob, dropout_seed)
    operands, arg_names = _autocast(operands), tuple(names.items())
    out, lse = differentiable_attention(where, operands, seed, options, arg_names)
    if key is not None:
        call_cache.store(key, cached_call(where, operands, options, arg_names))
    return as_given(*(whole(out, lse) if whole else (out, lse)), qkv_format)


def _packing(*values: Any) -> Packing | None:
    return None if all(value is None for value in values) else Packing(*values)


def _key(
    where: MeshArg,
    operands: Operands[Tensor],
    dropout_seed: int | Tensor | None,
    qkv_format: str,
    packing: Packing | None,
    options: Options,
) -> Hashable:
    """All that the checks of this call look at, by which it is found again, whoever makes it; None where they look at values, or
    where the operands are made anew in each call."""
    functions, dropout = options.mask_mod is not None or options.mask_builder is not None, options.dropout_prob
    if functions or options.bottom_right or dropout_seed is not None or packing is not None:
        return None
    if type(dropout) not in (float, int) or dropout or not _ids_as_they_are(operands):
        return None
    values, window = tuple(vars(options).values()), options.sliding_window
    kinds = *map(type, values), *(map(type, window) if isinstance(window, tuple) else ())  # 4.0 equals 4, and is checked
    return call_cache.key(where, operands.given, qkv_format, values, kinds)


def _ids_as_they_are(operands: Operands[Tensor]) -> bool:
    """Whether ids are operands as they came: int32, which has nothing to check, and for both sides or none."""
    sides = (operands.q_segment_ids, operands.kv_segment_ids), (operands.q_position_ids, operands.kv_position_ids)
    return all([getattr(x, "dtype", None) for x in pair] in ([None, None], [torch.int32, torch.int32]) for pair in sides)


def _autocast(operands: Operands[Tensor]) -> Operands[Tensor]:
    """Queries, keys and values cast as torch casts the inputs of its own attention under ``torch.autocast``: all floats but
    float64."""
    kind = operands.query.device.type
    # Asked last, because torch.compile of torch 2.11 cannot trace the question.
    known = kind in ("cpu", "cuda", "xla") or torch.amp.is_autocast_available(kind)
    if not (known and torch.is_autocast_enabled(kind)):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    cast = {torch.float16, torch.bfloat16, torch.float32}
    q, k, v = (x.to(dtype) if x.dtype in cast else x for x in operands.qkv)
    return operands.with_qkv(q, k, v)


def _seed(dropout_prob: float, seed: int | Tensor | None) -> int | Tensor | None:
    """64 bits; a tensor where its value cannot be read, because torch traces or transforms the call."""
    if seed is None:
        seed = torch.randint(2**63 - 1, (), device="cpu") if dropout_prob else None
    if seed is None:
        return None
    if isinstance(seed, Tensor) and seed.numel() == 1 and not (seed.is_floating_point() or seed.is_complex()):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return seed
        seed = int(seed)
    number = plain(seed)
    if isinstance(number, bool) or not isinstance(number, int) or not -(2**63) <= number < 2**64:
        raise ValueError(f"dropout_seed must be an int of 64 bits, or an integer tensor of one element; got {seed!r}")
    return number
