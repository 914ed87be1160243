"""Rings on which a packed row lies by its documents, as :func:`ring_attn.shard_packed` places them, in the place of a layout."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from jax_core.masks.layout import Layout, padded_length
from ring_attn.documents import table
from ring_attn.documents.reading import begins_of
from ring_attn.packed.documents import Documents, documents_in
from ring_attn.packed.piece_table import piece_table
from ring_attn.packed.placement import Placement, place
from ring_attn.ring import Ring
from ring_attn.sharding import sequence
from ring_attn.sharding.marks import mark_bounds, mark_shard
from torch_bridge.mesh.rings import MeshDim

_NEEDS_BATCH = (
    "with place_documents=True each batch has an order of its own, which the ring does not know; call cp.unshard(tensor, batch) "
    "with the batch that cp.shard made"
)


def placing(ring: Ring, place_documents: bool | None, against: str | None) -> Ring:
    """The ring that places documents, if it is to; None: if it can. ``against``: why the model allows no order of its own. Raises
    ValueError for a layout that is a plan, NotImplementedError for such a model."""
    by_name = isinstance(ring.layout, str)
    if place_documents is None and (against is not None or not by_name or ring.size == 1):
        return ring
    if (place_documents or isinstance(ring, PlacingRing)) and against is not None:
        raise NotImplementedError(against)
    if place_documents is False:
        return ring
    if not by_name:
        raise ValueError(f"place_documents=True places documents itself; give a layout by name, not a plan; got {ring.layout}")
    return PlacingRing(ring.mesh, **_options(ring), where_it_can_be=place_documents is None)


class _Options(TypedDict):
    """Of a :class:`Ring`, but for its mesh."""

    mesh_dim: MeshDim
    layout: Layout
    strategy: str
    buckets: int


def _options(ring: Ring) -> _Options:
    return {"mesh_dim": ring.mesh_dim, "layout": ring.layout, "strategy": ring.strategy, "buckets": ring.buckets}


@dataclass(frozen=True, kw_only=True)
class PlacingRing(Ring):
    """A ring for batches of which each may have an order of its own. ``where_it_can_be``: what cannot lies in the layout."""

    where_it_can_be: bool = False

    def of(self, documents: Tensor | None, by_place: bool) -> Ring:
        """The ring for whole sequences of these numbers of ``documents [rows, seq]``, negative on padding, None for one a row. Only
        one row of several documents is placed, each of one number. ``by_place``: whether masks may go by places in the row, which
        is refused later where documents are to be placed."""
        if documents is not None and documents.shape[0] == 1 and not (self.where_it_can_be and (by_place or documents[0, 0] < 0)):
            firsts = documents[begins_of(documents)]
            if 1 < len(firsts) == len(firsts.unique()):
                return PlacedRing(self.mesh, documents=documents, **_options(self))
        return Ring(self.mesh, **_options(self))

    def unshard(self, tensor: Tensor, *, dim: int = 1, length: int | None = None) -> NoReturn:
        raise ValueError(_NEEDS_BATCH)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedRing(Ring):
    """The ring of one packed row, of these numbers of ``documents [1, seq]``, negative on padding. Its methods take and give whole
    tensors in the order of the row."""

    documents: Tensor = field(repr=False)

    @cached_property
    def padded(self) -> int:
        """The length of the row with its padding."""
        return padded_length(self.layout, self.size, self.documents.shape[1], self.buckets)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 ``[1, local]``: how far each of this rank's tokens is from the first of its document, 0 on padding: what masks go
        by."""
        whole = torch.zeros(1, self.padded, dtype=torch.int64)
        whole[0, self._real.tokens] = self._real.offsets
        return mark_bounds(self.shard(whole).to(self.documents.device), self.piece_table)

    @cached_property
    def piece_table(self) -> table.Documents | None:
        """What kernels are told of the placement: the same for ids and positions."""
        return piece_table(self._placement, self._real, self.padded, self.processes, self.documents.device)

    @cached_property
    def _real(self) -> Documents:
        numbers = self.documents.cpu()
        return documents_in(numbers, begins_of(numbers))

    @cached_property
    def _placement(self) -> Placement:
        return place(self._real.lengths, self.size, self.padded // self.size)

    @cached_property
    def _order(self) -> Tensor:
        """int64 ``[padded]``: which token of the row each place of all ranks has."""
        placed = torch.from_numpy(self._placement.order(self._real.lengths, self.padded // self.size))
        rest = torch.ones(self.padded, dtype=torch.bool).index_fill(0, self._real.tokens, False).nonzero().flatten()
        order = torch.empty_like(placed)
        order[placed >= 0], order[placed < 0] = self._real.tokens[placed[placed >= 0]], rest
        return order

    @property
    def _local_order(self) -> Tensor:
        return self._order.view(self.size, -1)[self.rank]

    def shard(self, tensor: Tensor, *, dim: int = 1) -> Tensor:
        if tensor.shape[dim] != self.padded:
            raise ValueError(f"this row has {self.padded} tokens with its padding, got {tensor.shape[dim]} in dim {dim}; pad it")
        shard = tensor.index_select(dim, self._local_order.to(tensor.device))
        if self.size > 1:
            mark_shard(shard)
        return shard

    def unshard(self, tensor: Tensor, *, dim: int = 1, length: int | None = None) -> Tensor:
        joined = sequence.unshard(tensor, self.mesh, mesh_dim=self.mesh_dim, dim=dim)
        whole = joined.index_select(dim, self._order.argsort().to(tensor.device))
        return whole if length is None else whole.narrow(dim, 0, length)

    def pad(self, tensor: Tensor, *, dim: int = 1, value: float = 0) -> Tensor:
        missing = self.padded - tensor.shape[dim]
        return functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + [0, missing], value=value)

    def positions(self, length: int, *, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's tokens are in the row of this ``length``, or its padded length."""
        return self._local_order.to(device)
