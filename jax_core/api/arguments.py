"""The arguments of :func:`jax_core.ring_attention`: which there are, and what they are as options, arrays and the ring's axis."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.lax import Precision
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_core.config import RingAttentionConfig
from jax_core.masks.dropout import seed_words
from jax_core.masks.layout import Layout
from jax_core.masks.static import Window
from jax_core.operands import Operands
from jax_core.options import AxisName, MaskBuilder, MaskInfo, MaskMod, Options


class _Static(TypedDict, total=False):
    """Arguments of :func:`ring_attention` that become options of the same name."""

    mask_builder: MaskBuilder | None
    mask_mod: MaskMod | None
    chunk_size: int | None
    causal: bool
    bottom_right: bool
    logits_soft_cap: float | None
    softmax_scale: float | None
    dropout_prob: float
    layout: Layout
    fused_backward: bool
    deterministic: bool
    precision: Precision | str | None
    platform: str | None
    strategy: str
    cfg: RingAttentionConfig | None


class _Common(_Static, total=False):
    mask_info: MaskInfo | None
    mask: ArrayLike | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    q_position_ids: ArrayLike | None
    kv_position_ids: ArrayLike | None
    sliding_window: Window
    alibi_slopes: ArrayLike | None
    dropout_seed: ArrayLike | None
    axis_name: AxisName


class Keywords(_Common, total=False):
    return_lse: bool


class OnMesh(_Common, total=False):
    mesh: Mesh | None
    in_specs: Sequence[PartitionSpec | None] | None
    out_specs: PartitionSpec | tuple[PartitionSpec, PartitionSpec] | None


class Anywhere(OnMesh, total=False):
    return_lse: bool


def request_of(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    softmax_aux: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_position_ids: ArrayLike | None = None,
    kv_position_ids: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_seed: ArrayLike | None = None,
    axis_name: AxisName = None,
    return_lse: bool = False,
    sliding_window: Window = None,
    **static: Unpack[_Static],
) -> tuple[Options, Operands, AxisName]:
    """The arguments of :func:`ring_attention` as static options, arrays, and the ring's axis."""
    operands = Operands(
        query=jnp.asarray(query),
        key=jnp.asarray(key),
        value=jnp.asarray(value),
        softmax_aux=_array(softmax_aux),
        bias=_array(bias),
        mask=_array(mask),
        q_segment_ids=_array(q_segment_ids),
        kv_segment_ids=_array(kv_segment_ids),
        q_position_ids=_positions("q_position_ids", q_position_ids, static.get("mask_mod")),
        kv_position_ids=_positions("kv_position_ids", kv_position_ids, static.get("mask_mod")),
        alibi_slopes=_array(alibi_slopes),
        dropout_seed=None if dropout_seed is None else seed_words(dropout_seed),
    )
    operands, axis_name = _open_mask_info(mask_info, operands, axis_name)
    _check_precision(static.get("precision"))
    window = sliding_window
    if isinstance(window, list):  # lists cannot be hashed
        window = tuple(window)  # type: ignore[assignment]  # its length is checked later
    return Options(sliding_window=window, lse_gradient=return_lse, **static), operands, axis_name


def _check_precision(precision: object) -> None:
    try:
        Precision(precision) if precision is not None else None
    except ValueError:
        raise ValueError(
            f"precision must be a jax.lax.Precision or its name, one for all products, or None; got {precision!r}"
        ) from None


def _array(x: ArrayLike | None) -> Array | None:
    return None if x is None else jnp.asarray(x)


def _positions(name: str, ids: ArrayLike | None, mask_mod: MaskMod | None) -> Array | None:
    """A mask function is traced for positions of 32 bits; without one 64 stay, which masks then use."""
    x = _array(ids)
    if x is None or mask_mod is None or x.dtype.name != "int64":
        return x
    if x.size and not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True):  # else its values are not known here
        known = np.asarray(ids)  # JAX would trace what is computed of an array that a traced function closes over
        low, high = int(known.min()), int(known.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"mask_mod takes positions of 32 bits: {name} has values from {low} to {high}")
    return x.astype(jnp.int32)


def _open_mask_info(mask_info: MaskInfo | None, operands: Operands, axis_name: AxisName) -> tuple[Operands, AxisName]:
    if mask_info is None:
        return operands, axis_name
    if not isinstance(mask_info, MaskInfo):
        raise ValueError(f"mask_info must be a jax_core.MaskInfo, got {type(mask_info).__name__}")
    inside = dict(mask=mask_info.attention_mask, q_segment_ids=mask_info.q_segment_ids, kv_segment_ids=mask_info.kv_segment_ids)
    twice = [name for name, array in inside.items() if array is not None and getattr(operands, name) is not None]
    if twice:
        raise ValueError(f"{', '.join(twice)} came both in mask_info and by name; give each once")
    operands = operands._replace(
        mask=operands.mask if mask_info.attention_mask is None else mask_info.attention_mask,
        q_segment_ids=operands.q_segment_ids if mask_info.q_segment_ids is None else mask_info.q_segment_ids,
        kv_segment_ids=operands.kv_segment_ids if mask_info.kv_segment_ids is None else mask_info.kv_segment_ids,
    )
    return operands, axis_name if axis_name is not None else mask_info.sequence_axis_name
