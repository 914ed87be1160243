"""The arrays of one attention, as one record from the caller's door to the kernels. Importing this module loads no JAX: they may be
torch's tensors, too.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

# Documents a sequence that kernels are told of; each costs a tile of padding in a backward's sums, and a step of a tile scheduler.
MOST_DOCUMENTS = 4096
MOST_SHARED = 32  # documents of a placement that several ranks have a part of; each costs a tile in every step's backward
EIGHTHS = 8  # in which it is counted how much of a shard those documents take
NOBODY = 2**31 - 1  # the document of a piece of no tokens
A = TypeVar("A")  # the kind of array


class Shaped(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Sequence[int]: ...


class Keys(NamedTuple, Generic[A]):
    """Keys and values that are here, with their ids: what travels between ranks."""

    key: A
    value: A
    segment_ids: A | None
    position_ids: A | None


class Operands(NamedTuple, Generic[A]):
    """The arrays of one attention, as local shards; all but the first three may be None.

    ``query [batch, q_length, heads, dim]``; ``key [batch, k_length, kv_heads, dim]``;
    ``value [batch, k_length, kv_heads, value_dim]``; ``softmax_aux [heads] | [sinks] | [heads, sinks]``; ``bias`` (float) and
    ``mask`` (bool) broadcast to ``[batch, heads, q_length, keys of the whole sequence]``, rows in shard order and columns in
    sequence order; ids int32 ``[length] | [batch|1, length]``; ``alibi_slopes [heads] | [batch|1, heads]``; ``dropout_seed`` uint32
    ``[2]``; ``origin`` int32 ``[2]``, the first batch entry and head held here; ``documents`` int32 ``[batch|1, most + 1]``, the
    same on all ranks: where each document begins in the whole sequence, ascending, and where the last one ends, for all places that
    are left; in place of segment ids, for queries and keys of one length. Or ``[ranks, most, 3]``, in place of position ids, too: a
    table of pieces (``masks.placement``). ``rank`` int32 ``[1]``, this device's rank in the ring (None: ``lax.axis_index`` gives
    it); ``predicate_arrays`` as in :class:`Extras`.
    """

    query: A
    key: A
    value: A
    softmax_aux: A | None = None
    bias: A | None = None
    mask: A | None = None
    q_segment_ids: A | None = None
    kv_segment_ids: A | None = None
    q_position_ids: A | None = None
    kv_position_ids: A | None = None
    alibi_slopes: A | None = None
    dropout_seed: A | None = None
    origin: A | None = None
    documents: A | None = None
    rank: A | None = None
    predicate_arrays: tuple[tuple[A | Shaped | None, ...], ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[A | None], predicate_arrays: tuple[tuple[A | Shaped | None, ...], ...] = ()) -> "Operands[A]":
        """``arrays``: what callers give, in the order of :attr:`given`; those that follow are left out."""
        named: dict[str, Any] = dict(zip(cls._fields[:GIVEN], arrays, strict=False))
        return cls(**named, predicate_arrays=predicate_arrays)

    @property
    def keys(self) -> Keys[A]:
        return Keys(self.key, self.value, self.kv_segment_ids, self.kv_position_ids)

    @property
    def qkv(self) -> tuple[A, A, A]:
        return self.query, self.key, self.value

    @property
    def given(self) -> tuple[A | None, ...]:
        """What callers give, in this order: all but the rank and the arrays of predicates."""
        arrays: Any = self
        return tuple(arrays[:GIVEN])

    def replaced(self, **arrays: A | None) -> "Operands[A]":
        others: Any = arrays
        return self._replace(**others)

    def with_qkv(self, query: A, key: A, value: A) -> "Operands[A]":
        return self._replace(query=query, key=key, value=value)


GIVEN = Operands._fields.index("rank")


def is_placed(documents: Shaped | None) -> bool:
    """Whether documents, which may be None, lie by a table of pieces."""
    return documents is not None and len(documents.shape) == 3
