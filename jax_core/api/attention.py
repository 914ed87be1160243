"""The native JAX API: one function that works inside ``shard_map``, on a mesh, and on one device."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Literal, Unpack, overload

import jax
from jax import Array
from jax.lax import Precision
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_core.api.arguments import Anywhere, Keywords, OnMesh, request_of
from jax_core.api.differentiable import attend, local_attention, local_spec
from jax_core.api.mesh import on_mesh, plan_mesh
from jax_core.api.names import OTHERS
from jax_core.config import RingAttentionConfig
from jax_core.keywords import explains
from jax_core.masks.layout import Layout
from jax_core.masks.static import Window
from jax_core.operands import Operands
from jax_core.options import AxisName, MaskBuilder, MaskInfo, MaskMod, Options
from jax_core.request.explain import Explanation, explanation_of


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[OnMesh],
) -> Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[OnMesh],
) -> tuple[Array, Array]: ...


@explains(OTHERS)
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    mask: ArrayLike | None = None,
    mask_builder: MaskBuilder | None = None,
    mask_mod: MaskMod | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_position_ids: ArrayLike | None = None,
    kv_position_ids: ArrayLike | None = None,
    sliding_window: Window = None,
    chunk_size: int | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    axis_name: AxisName = None,
    layout: Layout = "contiguous",
    return_lse: bool = False,
    fused_backward: bool = False,
    deterministic: bool = False,
    precision: Precision | str | None = None,
    platform: str | None = None,
    strategy: str = "auto",
    cfg: RingAttentionConfig | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, PartitionSpec] | None = None,
) -> Array | tuple[Array, Array]:
    """Exact attention over a sequence sharded across devices; differentiable in every floating operand and in the LSE.

    Call it in one of three ways: inside ``shard_map`` with ``axis_name`` (arrays are this device's shards); with ``mesh`` (arrays
    are global, in the layout's order, and it wraps itself in ``shard_map``); or with neither (the whole sequence on one device).

    Args:
        query: ``[batch, q_length, heads, dim]``, float16, bfloat16, float32 or float64; key and value have the same dtype.
        key: ``[batch, k_length, kv_heads, dim]``; ``heads`` is a multiple of ``kv_heads`` (GQA, MQA).
        value: ``[batch, k_length, kv_heads, value_dim]``.
        softmax_aux: attention sinks, logits that join the softmax's denominator: ``[heads]`` (one per head), ``[sinks]`` (any
            other length, shared by all heads), or ``[heads, sinks]``. (``jax.nn.dot_product_attention`` has the bias here.)
        bias: float, broadcasts to ``[batch, heads, q_length, S]``, with ``S`` all keys of the sequence: rows in shard order,
            columns in sequence order. Added after the scale and the soft cap.
        mask_info: attention mask, segment ids and sequence axis in one argument; do not also pass these by name.
        mask: bool (True: may attend), broadcasts as ``bias`` does.
        mask_builder: ``(q_len, kv_len, num_heads, head_idx, num_reps)`` -> an object that slices to booleans over global indices.
        mask_mod: ``(batch, head, q_pos, k_pos) -> bool`` on traced scalars; may close over JAX arrays. Inside ``shard_map`` batch
            and head count from 0 on each device; with ``mesh`` they are global.
        q_segment_ids, kv_segment_ids: int ``[batch, length]``; a query sees only keys of its own segment. Negative ids mark
            padding, which neither attends nor is attended to; its query, key, value and cotangents may hold anything, including
            NaN. One side is enough when queries and keys have equal length.
        q_position_ids, kv_position_ids: int ``[batch, length]`` or ``[length]``; they replace the layout's positions in causal,
            window, chunk, ALiBi and ``mask_mod``. Any int32 values; with them, windows and chunks must be below ``2**31``. One
            side is enough when queries and keys have equal length.
        sliding_window: ``q - left <= k <= q + right``; an int sets both sides, -1 or None means no bound.
        chunk_size: Llama-4's chunked attention, which is causal: ``k <= q`` within ``q // chunk_size == k // chunk_size``.
        causal: ``k <= q`` by position; with unequal lengths query 0 is at position 0.
        bottom_right: the last query is at the last key's position instead, in causal masks and windows.
        logits_soft_cap: ``cap * tanh(x / cap)``, applied to the scaled logits.
        softmax_scale: None means ``1 / sqrt(dim)``.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``; adds ``-slope * abs(q - k)``.
        dropout_prob: probability that an attention weight is dropped; kept weights are scaled by ``1 / (1 - prob)``.
        dropout_seed: int, integer scalar or uint32 ``[2]``; the same on all devices. The pattern depends only on the seed, batch,
            head and the global indices of query and key; batch and head are numbered as for ``mask_mod`` (under ``vmap`` every
            entry is batch 0: give each its own seed).
        axis_name: the mesh axis that shards the sequence, or a tuple of axes, the first being the major one.
        layout: "contiguous", "zigzag", "striped", or a plan of :func:`jax_core.balance` (for queries and keys of its length): how
            the sequence is laid out over the ring (``jax_core.masks.layout``).
        return_lse: also return the logarithm of the softmax's denominator.
        fused_backward: True requires a kernel that computes dQ, dK and dV in one sweep over the scores (xla does), and is an error
            with one that cannot; False leaves the choice to the kernel.
        deterministic: True requires a kernel that gives the same bits in every run (xla, pallas, triton without ``fused_backward``,
            cute without lists of blocks), and "auto" takes the first of those. cuDNN's dQ may differ in its last bits.
        precision: of the matrix products, a ``jax.lax.Precision`` or its name; None means the highest.
        platform: "xla", "triton", "cute", "cuda", "pallas", or "auto"/None to choose. A named one runs, or the error says why it
            cannot.
        strategy: how the ranks share the work (docs/strategies.md): "ring" (K/V travel between kernel calls), "all_gather" (all at
            once), "ulysses" (all-to-all of heads), "ulysses_ring" and "ring_ulysses" (both, on two axes), "hierarchical" (two axes,
            the first between hosts), "decode" (queries that all ranks hold), "fused" (TPUs only: one kernel sends K/V while it
            computes; no bias, mask, mask function, position ids, ALiBi or dropout), or "auto": on GPUs as measured on H200; else
            ring.
        cfg: :class:`RingAttentionConfig`.
        mesh: a ``jax.sharding.Mesh``.
        in_specs: with ``mesh``: PartitionSpecs of query, key, value, softmax_aux, bias, q_segment_ids, kv_segment_ids. Without them
            batch and heads stay split as in the query. If a traced query does not show its split (Auto axes under ``jit``), the
            batch is split over the mesh's other axes as far as they divide it.
        out_specs: with ``mesh``: PartitionSpec of the output (a pair with ``return_lse``).

    Returns:
        ``out [batch, q_length, heads, value_dim]`` in the query's dtype; with ``return_lse`` also ``lse [batch, heads, q_length]``,
        natural log, float32 (float64 for float64 inputs). A row that sees no key has output 0, LSE ``-inf`` (the sinks' LSE if
        there are sinks) and zero gradients.

    Raises:
        ValueError: inconsistent arguments. NotImplementedError: the named platform or strategy cannot compute this.

    Ring: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889. Inside ``shard_map(..., check_vma=False)``, ``jax.grad`` within the mapped
    function returns each device's part of the gradient of a replicated operand, as for any parameter there.
    """
    return _attention(
        local_attention,
        query,
        key,
        value,
        softmax_aux,
        bias,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        mask_info=mask_info,
        mask=mask,
        mask_builder=mask_builder,
        mask_mod=mask_mod,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_position_ids=q_position_ids,
        kv_position_ids=kv_position_ids,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        causal=causal,
        bottom_right=bottom_right,
        logits_soft_cap=logits_soft_cap,
        softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        axis_name=axis_name,
        layout=layout,
        return_lse=return_lse,
        fused_backward=fused_backward,
        deterministic=deterministic,
        precision=precision,
        platform=platform,
        strategy=strategy,
        cfg=cfg,
    )


def explain(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    **arguments: Unpack[Anywhere],
) -> Explanation:
    """What :func:`ring_attention` would run with these arguments, and why nothing else: the strategy, the kernel, their settings,
    what the others refuse, and the bytes sent and held. ``print`` it.

    The call is traced, not compiled or run; arrays may be ``jax.ShapeDtypeStruct``. Raises what the call raises while it is traced:
    outside of ``shard_map`` give ``mesh``.
    """
    given: dict[str, object] = {**arguments, "softmax_aux": softmax_aux, "bias": bias}
    arrays = {name: x for name, x in given.items() if name in Operands._fields and x is not None}
    static = {name: x for name, x in given.items() if name not in arrays}
    decided = []

    def local(
        options: Options, shards: Operands, axis_name: AxisName, head_shards: int = 1, backend: str | None = None
    ) -> tuple[Array, Array]:
        spec, completed = local_spec(options, shards, axis_name, head_shards, backend)
        decided.append((options, spec))
        return attend(spec, completed)

    call = explains(OTHERS)(wraps(ring_attention)(partial(_attention, local)))
    jax.eval_shape(lambda q, k, v, more: call(q, k, v, **more, **static), query, key, value, arrays)
    return explanation_of(*decided[-1])


def create_shard_map_wrapper(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, PartitionSpec] | None = None,
    **arguments: Unpack[Keywords],
) -> tuple[Callable[..., Array | tuple[Array, Array]], tuple[Array, ...]]:
    """:func:`ring_attention` on a mesh, not yet called: returns ``(fn, args)``, and ``fn(*args)`` is the result. ``arguments`` are
    its other keyword arguments. ``args`` are the given arrays, in the order of :class:`jax_core.strategies.contract.Operands`."""
    options, operands, axis_name = request_of(query, key, value, softmax_aux, bias, **arguments)
    more = arguments.get("return_lse", False), arguments.get("strategy", "auto")
    plan = plan_mesh(operands, mesh, axis_name, in_specs, out_specs, *more)
    return on_mesh(options, operands, plan)


def _attention(
    local: Callable[..., tuple[Array, Array]],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, PartitionSpec] | None = None,
    **arguments: Unpack[Keywords],
) -> Array | tuple[Array, Array]:
    """:func:`ring_attention`, with ``local`` as the attention of local shards."""
    options, operands, axis_name = request_of(query, key, value, softmax_aux, bias, **arguments)
    return_lse = options.lse_gradient
    if mesh is not None:
        plan = plan_mesh(operands, mesh, axis_name, in_specs, out_specs, return_lse, options.strategy)
        function, whole = on_mesh(options, operands, plan, local)
        return function(*whole)
    if in_specs is not None or out_specs is not None:
        raise ValueError("in_specs and out_specs describe arrays on a mesh: give mesh= too")
    out, lse = local(options, operands, axis_name)
    return (out, lse) if return_lse else out
