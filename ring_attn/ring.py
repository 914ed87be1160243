"""``Ring``: what every call on one ring must agree on, in one object."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from jax_core.masks.balance import balance as plan_for
from jax_core.masks.layout import Layout, check_buckets, check_layout
from jax_core.masks.plan import Plan
from ring_attn.functional import AttentionOptions, ring_attention
from ring_attn.sharding import sequence
from ring_attn.sharding.sequence import ShardedBatch
from torch_bridge.mesh.rings import MeshDim, MeshLike, ProcessRing, resolve

BUCKETS = 8  # lengths an octave


class Place(TypedDict):
    """A ring and its layout, for a function that takes them one by one."""

    mesh: MeshLike
    mesh_dim: MeshDim
    layout: Layout


class OneByOne(TypedDict, total=False):
    """A ring, or what makes one (:func:`as_ring`)."""

    ring: "Ring | None"
    mesh: MeshLike
    mesh_dim: MeshDim


@dataclass(frozen=True)
class Ring:
    """A ring of processes, the layout of the sequence on it, and how attention is distributed over it. Its methods are the
    functions of the same names with these fixed.

    ``mesh``, ``mesh_dim``: as for :func:`ring_attn.ring_attention`; several mesh dimensions make one ring.
    ``layout``: "contiguous", "zigzag", "striped", or a plan of :func:`ring_attn.balance`. ``strategy``: as there, for every
    attention on the ring that names none itself. ``buckets``: how many lengths in each octave (from a power of two times the
    shortest that the layout can split, to the next) :meth:`pad`, :meth:`positions` and :meth:`shard_batch` round a length up to,
    so that a batch of a new length seldom compiles new programs. With 8 it grows by 12.5 % at most, and up to 16 times the
    shortest not at all. 0: to the next that the layout can split. A plan is for one length, and rounds nothing.

    Raises ValueError for an unknown layout and ``buckets`` that are no count, and on first use for a mesh that is none and an
    unknown strategy.
    """

    mesh: MeshLike = None
    _: KW_ONLY
    mesh_dim: MeshDim = None
    layout: Layout = "contiguous"
    strategy: str = "auto"
    buckets: int = BUCKETS

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_buckets(self.buckets)
        if isinstance(self.mesh_dim, list):
            object.__setattr__(self, "mesh_dim", tuple(self.mesh_dim))  # a Ring is hashable

    @property
    def processes(self) -> ProcessRing:
        """The processes that share the sequence, as the bridge knows them."""
        return resolve(self.mesh, self.mesh_dim)

    @property
    def size(self) -> int:
        """The number of processes that share the sequence."""
        return self.processes.size

    @property
    def rank(self) -> int:
        """This process's place in the ring."""
        return self.processes.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ring's process group, of one process for a ring of one; None in a job of one process without torch.distributed. Over
        several mesh dimensions the first use may have to make it: then all ranks of the ring ask for it (all of the job where
        ``init_process_group`` got a ``device_id``). Raises ValueError for ``mesh="local"`` in a job of several processes: there is
        none, and torch takes None for all of them."""
        return self.processes.group

    def arguments(self) -> Place:
        """``mesh``, ``mesh_dim`` and ``layout``, for a function that takes them one by one."""
        return {"mesh": self.mesh, "mesh_dim": self.mesh_dim, "layout": self.layout}

    def shard(self, tensor: Tensor, *, dim: int = 1) -> Tensor:
        """:func:`ring_attn.shard`: ``[..., length, ...] -> [..., shard length, ...]`` along ``dim``."""
        return sequence.shard(tensor, dim=dim, **self.arguments())

    def unshard(self, tensor: Tensor, *, dim: int = 1, length: int | None = None) -> Tensor:
        """:func:`ring_attn.unshard`: ``[..., shard length, ...] -> [..., length, ...]`` along ``dim``."""
        return sequence.unshard(tensor, dim=dim, length=length, **self.arguments())

    def pad(self, tensor: Tensor, *, dim: int = 1, value: float = 0) -> Tensor:
        """:func:`ring_attn.pad` to one of the ring's ``buckets``, along ``dim``; the other dimensions keep their shape."""
        return sequence.pad(tensor, dim=dim, value=value, buckets=self.buckets, **self.arguments())

    def positions(self, length: int, *, device: torch.device | str | None = None) -> Tensor:
        """:func:`ring_attn.positions`, of a sequence padded as :meth:`pad` does: int64 ``[shard length]``."""
        return sequence.positions(length, device=device, buckets=self.buckets, **self.arguments())

    def shard_batch(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> ShardedBatch:
        """:func:`ring_attn.shard_batch`, padded as :meth:`pad` does; all tensors ``[batch, length]``."""
        tensors = labels, position_ids, segment_ids, attention_mask
        return sequence.shard_batch(input_ids, *tensors, **{"buckets": self.buckets, **options}, **self.arguments())

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
    ) -> Tensor: ...
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
    ) -> tuple[Tensor, Tensor]: ...
    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`ring_attn.ring_attention`; q ``[batch, seq, heads, dim]`` unless ``qkv_format`` says otherwise."""
        return ring_attention(q, k, v, **{"strategy": self.strategy, **options}, **self.arguments())


def as_ring(
    ring: Ring | None, mesh: MeshLike = None, mesh_dim: MeshDim = None, layout: Layout = "contiguous", buckets: int = BUCKETS
) -> Ring:
    """``ring``, or the one that the loose arguments make. Raises ValueError for both at a time."""
    loose = Ring(mesh, mesh_dim=mesh_dim, layout=layout, buckets=buckets)
    if ring is None:
        return loose
    if not isinstance(ring, Ring):
        raise ValueError(f"ring must be a ring_attn.Ring, got {type(ring).__name__}; a mesh is given as mesh=")
    if loose != Ring():
        raise ValueError("give either ring, which holds mesh, mesh_dim, layout and buckets, or these; got both")
    return ring


def balance(length: int, ranks: "int | Ring | MeshLike" = None, *, mesh_dim: MeshDim = None, **mask: Any) -> Plan:
    """A layout under which all ranks of a ring have nearly equal work: ``layout=plan``, or ``Ring(layout=plan)``, wherever a layout
    is taken. Print it to see its imbalance.

    ``length``: of the whole sequence. ``ranks``: a number, a :class:`Ring`, or what :func:`ring_attention` takes as ``mesh`` (with
    ``mesh_dim``). ``mask`` and the rest: the keyword arguments of :func:`jax_core.balance`, for instance ``causal=True,
    documents=lengths``, or ``cu_seqlens``, which may be tensors. Every rank calls it with the same, and gets an equal plan.

    Nothing is sent, and no JAX is loaded. Raises ValueError as :func:`jax_core.balance`.
    """
    if isinstance(ranks, Ring):
        size = ranks.size
    else:
        size = ranks if isinstance(ranks, int) else resolve(ranks, mesh_dim).size
    options: dict[str, Any] = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in mask.items()}
    return plan_for(length, size, **options)
