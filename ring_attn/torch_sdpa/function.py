"""``sdpa``: torch's ``scaled_dot_product_attention``, signature and semantics, on shards of a ring."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jax_core.masks.layout import Layout
from ring_attn.ring import Ring, as_ring
from ring_attn.sharding.reduction import where
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.mesh.protocol import tensors_per_sequence
from torch_bridge.mesh.rings import MeshArg, MeshDim, MeshLike


class _Sizes(NamedTuple):
    """``lead``: the dims before the heads. ``columns``: keys of the whole sequence."""

    lead: tuple[int, ...]
    heads: int
    rows: int
    columns: int


def _where(*_: object, **options: object) -> MeshArg | None:
    """No positional argument is the mesh."""
    return where(**options)


@propagates_errors(_where)
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` over a sequence sharded across processes. Differentiable with respect to
    query, key, value and a float ``attn_mask``.

    Every rank of the ring calls it with its shards, which have the same shapes on all ranks. With R the size of the ring:

    Args:
        query: ``[..., heads, L, dim]``, L positions of this rank. Any number of leading dims, or none; without heads ``[L, dim]``.
        key, value: ``[..., heads, S, dim]`` and ``[..., heads, S, value dim]``, S positions of this rank. The keys attended to are
            those of all ranks, ``R * S``. Leading dims, heads among them, broadcast.
        attn_mask: broadcasts to ``[..., heads, L, R * S]``: its rows are this rank's queries in the order of the layout, its
            columns the keys of the whole sequence in natural order. ``ring_attn.shard(mask, dim=-2)`` cuts a whole mask's rows.
            Bool: True may attend. Float: added to the scores; -inf hides a key. A bool mask with one row for all queries and one
            head (padding) costs memory linear in the sequence, any other ``L * R * S``.
        dropout_p: applied whenever it is not 0, as in torch. The seed is drawn from torch's default generator; the pattern is not
            torch's, and is the same for every ring and layout if the ranks have the same seed.
        is_causal: key position <= query position, in the whole sequence; query 0 is at position 0, as in torch.
        scale: factor on the scores, ``1 / sqrt(dim)`` by default.
        enable_gqa: key and value may have fewer heads, which divide the query's. Without it heads must be equal, or 1.
        ring: a :class:`ring_attn.Ring`; or mesh, mesh_dim, layout, as for :func:`ring_attn.ring_attention`.

    Returns:
        ``[..., heads, L, value dim]``. A query that sees no key gives 0, and gradients of 0, as torch does.

    Raises:
        ValueError: a mask together with ``is_causal``, a mask of other rows or columns than these, shapes, dtypes or heads that
            do not fit together, here or on another rank.
        torch_bridge.runtime.PeerFailure: another process of the ring died or stopped.
    """
    place = as_ring(ring, mesh, mesh_dim, layout)
    _check_inputs(query, key, value)
    q, k, v = (x[(None,) * (4 - x.ndim)] for x in (query, key, value))
    q, k, v = _broadcast(q, k, v, enable_gqa)
    parts = tensors_per_sequence(backend_of(query.device).resolve(place.mesh, place.mesh_dim))
    sizes = _Sizes(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2] * parts)
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal, query.ndim, sizes)
    masks = {} if attn_mask is None else _masks(attn_mask, sizes, place)
    q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    options: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p, "qkv_format": "bhsd", **masks}
    out = place.attention(q, k, v, **options)
    whole = out.unflatten(0, sizes.lead)
    return whole if query.ndim >= 4 else whole.squeeze(0) if query.ndim == 3 else whole.squeeze(0).squeeze(0)


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.ndim == key.ndim == value.ndim or query.ndim < 2:
        dims = f"{query.ndim}, {key.ndim} and {value.ndim}"
        raise ValueError(f"query, key and value must have the same number of dims, at least 2, got {dims}")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        raise ValueError(f"query and key must have one dim, key and value one length, got {shapes}; the length is dim -2")
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(query.device.type):
        raise ValueError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")


def _broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with one shape of leading dims. Keys and values keep fewer heads where both have the same number."""
    lead, heads = _common_lead(q, k, v), {x.shape[-3] for x in (q, k, v)}
    count = q.shape[-3] if enable_gqa else max(heads)
    if not enable_gqa and not heads <= {1, count}:
        raise ValueError(
            "query, key and value must have the same number of heads without enable_gqa=True, got "
            f"{q.shape[-3]}, {k.shape[-3]} and {v.shape[-3]}"
        )
    if any(number == 0 or count % number for number in heads if number != count):
        raise ValueError(f"the heads of key and value must divide those of query, {count}, got {k.shape[-3]} and {v.shape[-3]}")
    if k.shape[-3] != v.shape[-3]:
        k, v = (x.repeat_interleave(count // x.shape[-3], -3) for x in (k, v))
    q = q.expand(*q.shape[:-3], count, -1, -1)
    q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    return q, k, v


def _common_lead(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"the leading dims of query, key and value must broadcast, got {shapes}") from None


def _check_mask(mask: Tensor, is_causal: bool, dims: int, sizes: _Sizes) -> None:
    if is_causal:
        raise ValueError("give attn_mask or is_causal=True, not both, as in torch; write the causal mask into attn_mask")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask must be bool (True may attend) or float (added to the scores), got {mask.dtype}")
    whole = (*sizes.lead, sizes.heads, sizes.rows, sizes.columns)
    fits = all(given in (1, size) for given, size in zip(mask.shape[::-1], whole[::-1], strict=False))
    if mask.ndim > dims or not fits:
        raise ValueError(
            f"attn_mask must broadcast to {list(whole[-dims:])}: rows are this rank's {sizes.rows} queries, columns the "
            f"{sizes.columns} keys of the whole ring in natural order; got {list(mask.shape)}; cut the rows of a whole mask with "
            "ring_attn.shard(mask, dim=-2)"
        )


def _masks(mask: Tensor, sizes: _Sizes, ring: Ring) -> dict[str, Tensor]:
    """The mask as arguments of :func:`ring_attn.ring_attention`."""
    mask = mask[(None,) * (len(sizes.lead) + 3 - mask.ndim)]
    lead = sizes.lead if any(size != 1 for size in mask.shape[:-3]) else mask.shape[:-3]
    mask = mask.expand(*lead, -1, -1, sizes.columns).flatten(0, -4)
    if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return _padding(mask[:, 0, 0], sizes, ring)
    mask = mask.expand(-1, -1, sizes.rows, -1)
    if mask.dtype == torch.bool:
        return {"mask": mask}
    hidden = mask == float("-inf")
    return {"mask": ~hidden, "bias": mask.masked_fill(hidden, 0)}


def _padding(visible: Tensor, sizes: _Sizes, ring: Ring) -> dict[str, Tensor]:
    """Segment ids in which hidden keys ``[batch or 1, columns]`` are padding; every query keeps its own."""
    batch = math.prod(sizes.lead)
    keys = ring.shard(visible.expand(batch, -1))
    queries = torch.zeros(batch, sizes.rows, dtype=torch.int32, device=visible.device)
    return {"q_segment_ids": queries, "kv_segment_ids": keys.to(torch.int32) - 1}
