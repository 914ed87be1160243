"""What this library has sharded carries what it is: the ring, the layout, the dimension and the whole length, on the tensor itself.

A mark is an attribute, of tuples and numbers, so that it is saved and loaded with the tensor. Views have it too (of ``transpose``,
``view`` or a slice of other dimensions); what is computed from the tensor, a copy, or one on another device, has none. A lost mark
is silence, never an accusation.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from jax_core.masks.layout import Layout
from ring_attn.documents.table import Documents
from torch_bridge.call.sanity_checks import note_batch
from torch_bridge.mesh.protocol import AnyRing

_MARK, _SUMS, _DOCUMENTS = "ring_attn_shard", "ring_attn_whole", "ring_attn_documents"
_BOUNDS = "ring_attn_bounds"
IDS = "input_ids"


class Shard(NamedTuple):
    """``ring``: its global ranks in ring order. ``dim``: the one that was sharded. ``length``: of the whole tensor along it.
    ``role``: "input_ids" for those that shard_batch made."""

    ring: tuple[int, ...]
    layout: str
    dim: int
    length: int
    role: str = ""


def mark_shard(tensor: Tensor, shard: Shard | None = None) -> None:
    """Notes that a tensor is one rank's part, for those who take whole sequences to refuse it, and if it is known, which one."""
    if shard is not None or not is_shard(tensor):
        setattr(tensor, _MARK, () if shard is None else tuple(shard))


def is_shard(value: object) -> bool:
    """Whether ``value`` was marked; what is computed from it is not."""
    return getattr(value, _MARK, None) is not None


def shard_of(tensor: Tensor) -> Shard | None:
    """Which part of what a tensor is, or a view of one; None where that is not known."""
    mark = getattr(tensor, _MARK, None)
    if mark is not None:
        return Shard(*mark) if mark else None
    base = tensor._base if type(tensor) is Tensor else None
    mark = None if base is None else getattr(base, _MARK, None)
    return _of_view(tensor, base, Shard(*mark)) if base is not None and mark else None


def _of_view(view: Tensor, base: Tensor, shard: Shard) -> Shard | None:
    """The dimension is found by its stride and its length; None where several have them, or none."""
    wanted = base.stride(shard.dim), base.shape[shard.dim]
    dims = [dim for dim in range(view.ndim) if (view.stride(dim), view.shape[dim]) == wanted]
    unclear = len(dims) != 1 or wanted[1] == 1
    return None if unclear else shard._replace(dim=dims[0], role=shard.role if view.shape == base.shape else "")


def mark_batch(input_ids: Tensor, labels: Tensor, whole: Iterable[Tensor | None], ring: AnyRing) -> None:
    """What ``shard_batch`` made of the tensors of a ``whole`` batch, whose checksums its labels carry for the ranks to compare."""
    shard = shard_of(input_ids)
    if shard is not None:
        mark_shard(input_ids, shard._replace(role=IDS))
    mark_labels(labels, whole, ring)


def mark_labels(labels: Tensor, whole: Iterable[Tensor | None], ring: AnyRing) -> None:
    """The checksums of the ``whole`` batch of which these ``labels`` are this rank's, in any order, for the ranks to compare."""
    if not ranks_of(ring) or labels.device.type not in ("cpu", "cuda"):
        return
    sums = torch.stack([checksum(x).to(labels.device) for x in whole if x is not None])
    setattr(labels, _SUMS, (ranks_of(ring), sums))
    note_batch(ring, sums)


def whole_of(labels: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """The ring's global ranks, and int64 ``[n]``, the checksums of the whole batch; None where they are not known."""
    whole: tuple[tuple[int, ...], Tensor] | None = getattr(labels, _SUMS, None)
    return whole


def mark_documents(labels: Tensor) -> None:
    """That a row of the batch has several documents."""
    setattr(labels, _DOCUMENTS, True)


def has_documents(labels: Tensor) -> bool:
    """Whether that was noted."""
    return getattr(labels, _DOCUMENTS, False)


def mark_bounds(ids: Tensor, bounds: Documents | None) -> Tensor:
    """These ids, as those of the documents of the whole, if there is a table of them."""
    if bounds is not None:
        setattr(ids, _BOUNDS, tuple(bounds))
    return ids


def bounds_of(queries: Tensor | None, keys: Tensor | None) -> Documents | None:
    """The documents that both are ids of, if that is known; the keys' may be left out."""
    bounds = getattr(queries, _BOUNDS, None)
    if bounds is None or (keys is not None and getattr(keys, _BOUNDS, (None,))[0] is not bounds[0]):
        return None
    return Documents(*bounds)


def ranks_of(ring: AnyRing) -> tuple[int, ...]:
    """Empty where no rank has a part of its own: one process holds all, or there is one alone."""
    ranks: tuple[int, ...] = getattr(ring, "ranks", ())
    return ranks if len(ring.ranks_here) < ring.size else ()


def refuse_shard(tensor: Tensor, name: str, ring: AnyRing, dim: int) -> None:
    """ValueError for a part of a whole, where a whole is needed."""
    shard = shard_of(tensor)
    if shard is not None and shard.ring and shard.ring == ranks_of(ring) and shard.dim == dim:
        raise ValueError(
            f"{name} {list(tensor.shape)} is one rank's part already, of a whole of {shard.length} along dim {dim} "
            f"(layout {shard.layout!r}), and would be sharded again; give the whole tensor, the same on all ranks"
        )


def refuse_other_layout(tensor: Tensor, name: str, ring: AnyRing, dim: int, layout: Layout | None) -> None:
    """ValueError for a tensor that was sharded over ``ring`` along another dimension, or in another layout. None: any layout will
    do."""
    shard = shard_of(tensor)
    if shard is None or not shard.ring or shard.ring != ranks_of(ring):
        return
    if shard.dim != dim:
        raise ValueError(
            f"{name} {list(tensor.shape)} was sharded along its dim {shard.dim}, of {shard.length} in all, and its sequence is "
            f"taken to be dim {dim}: shard the sequence, ring_attn.shard(x, dim=...), or transpose; attention and what shards "
            "can also be told how it lies (qkv_format=, dim=)"
        )
    if layout is not None and shard.layout != str(layout):
        raise ValueError(
            f"{name} was sharded with layout={shard.layout!r}, and this call has layout={str(layout)!r}: masks and positions would "
            "be wrong. Give both the same, or use one ring_attn.Ring for both"
        )


def checksum(ids: Tensor) -> Tensor:
    """int64 ``[]``, of the shape of integers or bools ``[...]`` and of the values at their places."""
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    return ((ids.flatten().long() + 1) * places).sum() + hash(tuple(ids.shape)) % (1 << 31)
