"""The native JAX API: one function for a shard inside ``shard_map``, for a mesh, and for one device."""

from typing import Any

import jax.numpy as jnp

from jax_core.api.differentiable import attend
from jax_core.api.mesh import on_mesh, plan_mesh
from jax_core.masks.dropout import seed_words
from jax_core.request.options import MaskInfo, Options
from jax_core.strategies.contract import Operands


def ring_attention(
    query,
    key,
    value,
    softmax_aux=None,
    bias=None,
    *,
    mask_info: MaskInfo | None = None,
    mask=None,
    mask_builder=None,
    mask_mod=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_position_ids=None,
    kv_position_ids=None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    alibi_slopes=None,
    dropout_prob: float = 0.0,
    dropout_seed=None,
    axis_name: str | tuple[str, ...] | None = None,
    layout: str = "contiguous",
    return_lse: bool = False,
    fused_backward: bool = False,
    platform: str | None = None,
    strategy: str = "auto",
    cfg=None,
    mesh=None,
    in_specs=None,
    out_specs=None,
):
    """Exact attention over a sequence sharded across devices; differentiable in every floating operand and in the LSE.

    Three ways to call it: inside ``shard_map`` with ``axis_name`` (arrays are this device's shards); with ``mesh`` (arrays are
    global, in the layout's order; it wraps itself in ``shard_map``); with neither (the whole sequence on one device).

    Args:
        query: ``[batch, q_length, heads, dim]``, float16, bfloat16, float32 or float64; key and value in the same dtype.
        key: ``[batch, k_length, kv_heads, dim]``; ``heads`` is a multiple of ``kv_heads`` (GQA, MQA).
        value: ``[batch, k_length, kv_heads, value_dim]``.
        softmax_aux: attention sinks, logits that join the softmax's denominator: ``[heads]`` one a head, ``[sinks]`` of any other
            length shared by all heads, or ``[heads, sinks]``.
        bias: float, broadcasts to ``[batch, heads, q_length, S]`` with ``S`` all keys of the sequence: rows in shard order,
            columns in the sequence's own order. Added after scale and soft cap.
        mask_info: attention mask, segment ids and sequence axis in one; not together with the same arguments by name.
        mask: bool (True: may attend), shaped as ``bias``.
        mask_builder: ``(q_len, kv_len, num_heads, head_idx, num_reps)`` -> something that slices to booleans over global indices.
        mask_mod: ``(batch, head, q_pos, k_pos) -> bool`` on traced scalars; may close over JAX arrays. Inside ``shard_map`` batch
            and head count from 0 on each device, with ``mesh`` they are global.
        q_segment_ids, kv_segment_ids: int ``[batch, length]``; a query sees keys of its own segment only; negative is padding,
            which sees and is seen by nothing. One side is enough when queries and keys have equal length.
        q_position_ids, kv_position_ids: int ``[batch, length]`` or ``[length]``; take the place of the layout's positions in
            causal, window, chunk, ALiBi and ``mask_mod``. One side is enough when queries and keys have equal length.
        sliding_window: ``q - left <= k <= q + right``; an int is both sides, -1 or None no bound.
        chunk_size: Llama-4's chunked attention, which is causal: ``k <= q`` within ``q // chunk_size == k // chunk_size``.
        causal: ``k <= q`` by position; with unequal lengths query 0 stands at position 0 (give position ids to move it).
        logits_soft_cap: ``cap * tanh(x / cap)`` of the scaled logits.
        softmax_scale: None is ``1 / sqrt(dim)``.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``; adds ``-slope * abs(q - k)``.
        dropout_prob: probability that an attention weight is dropped; kept weights are scaled by ``1 / (1 - prob)``.
        dropout_seed: int, integer scalar or uint32 ``[2]``; the same on all devices. The pattern depends on the seed, batch, head
            and the global indices of query and key alone; batch and head count as for ``mask_mod`` (under ``vmap`` every entry is
            batch 0: give each a seed).
        axis_name: the mesh axis (or axes) that shard the sequence.
        layout: "contiguous", "zigzag" or "striped": how the sequence lies over the ring (``jax_core.masks.layout``).
        return_lse: also return the logarithm of the softmax's denominator.
        fused_backward: True demands a kernel that makes dQ, dK and dV in one sweep over the scores (xla does), and is an error
            with one that cannot; False leaves it to the kernel.
        platform: "xla", "triton", "cuda", "pallas", or "auto"/None to choose. A named one runs or the error says why not.
        strategy: "ring" (K/V travel between calls of a kernel), "fused" (on TPUs: one kernel sends them while it
            computes), or "auto": fused with a ``mesh`` on which the ring's devices are neighbours on the TPUs' torus, if
            no platform is named and it can. Fused takes no bias, mask, mask function, position ids, ALiBi or dropout.
        cfg: :class:`RingAttentionConfig`.
        mesh: a ``jax.sharding.Mesh``.
        in_specs: with ``mesh``: PartitionSpecs of query, key, value, softmax_aux, bias, q_segment_ids, kv_segment_ids.
        out_specs: with ``mesh``: PartitionSpec of the output (with ``return_lse`` a pair).

    Returns:
        ``out [batch, q_length, heads, value_dim]`` in the query's dtype; with ``return_lse`` also ``lse [batch, heads, q_length]``,
        natural log, float32 (float64 for float64 inputs). A row that sees no key gives 0, LSE ``-inf`` (the sinks' LSE when there
        are sinks) and zero gradients.

    Raises:
        ValueError: arguments that do not fit together. NotImplementedError: the named platform or strategy cannot compute this.

    Ring: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889. Inside ``shard_map(..., check_vma=False)`` taking ``jax.grad`` within the
    mapped function gives each device's part of the gradient of replicated operands, as for every parameter there.
    """
    arguments = dict(locals())  # everything given, under its own name
    mesh_arguments = {name: arguments.pop(name) for name in ("mesh", "in_specs", "out_specs")}
    if mesh is not None:
        function, operands = create_shard_map_wrapper(**arguments, **mesh_arguments)
        return function(*operands)
    if in_specs is not None or out_specs is not None:
        raise ValueError("in_specs and out_specs describe arrays on a mesh: give mesh= too")
    options, operands, axis_name = _gather(**arguments)
    out, lse = attend(options, operands, axis_name)
    return (out, lse) if return_lse else out


def create_shard_map_wrapper(query, key, value, softmax_aux=None, bias=None, *, mesh, in_specs=None, out_specs=None, **arguments):
    """:func:`ring_attention` on a mesh, not called yet: ``(fn, args)`` with ``fn(*args)`` the result. ``arguments`` are its other
    keyword arguments. ``args`` are the arrays that were given, in the order of :class:`jax_core.strategies.contract.Operands`."""
    options, operands, axis_name = _gather(query, key, value, softmax_aux, bias, **arguments)
    plan = plan_mesh(operands, mesh, axis_name, in_specs, out_specs, arguments.get("return_lse", False))
    return on_mesh(options, operands, plan)


def _gather(
    query,
    key,
    value,
    softmax_aux=None,
    bias=None,
    *,
    mask_info=None,
    mask=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_position_ids=None,
    kv_position_ids=None,
    alibi_slopes=None,
    dropout_seed=None,
    axis_name=None,
    return_lse=False,
    sliding_window=None,
    **static,
) -> tuple[Options, Operands, str | tuple[str, ...] | None]:
    """The arguments of :func:`ring_attention` as static options, arrays, and the ring's axis."""
    seed = None if dropout_seed is None else seed_words(dropout_seed)
    ids = q_segment_ids, kv_segment_ids, q_position_ids, kv_position_ids
    arrays = query, key, value, softmax_aux, bias, mask, *ids, alibi_slopes, seed
    given: dict[str, Any] = {
        name: None if array is None else jnp.asarray(array) for name, array in zip(Operands._fields, arrays, strict=False)
    }
    operands = Operands(**given)
    operands, axis_name = _open_mask_info(mask_info, operands, axis_name)
    window = tuple(sliding_window) if isinstance(sliding_window, list) else sliding_window
    return Options(sliding_window=window, lse_gradient=return_lse, **static), operands, axis_name


def _open_mask_info(mask_info: MaskInfo | None, operands: Operands, axis_name):
    if mask_info is None:
        return operands, axis_name
    if not isinstance(mask_info, MaskInfo):
        raise ValueError(f"mask_info must be a jax_core.MaskInfo, got {type(mask_info).__name__}")
    inside = dict(mask=mask_info.attention_mask, q_segment_ids=mask_info.q_segment_ids, kv_segment_ids=mask_info.kv_segment_ids)
    inside = {name: array for name, array in inside.items() if array is not None}
    twice = [name for name in inside if getattr(operands, name) is not None]
    if twice:
        raise ValueError(f"{', '.join(twice)} came both in mask_info and by name; give each once")
    return operands._replace(**inside), axis_name if axis_name is not None else mask_info.sequence_axis_name
