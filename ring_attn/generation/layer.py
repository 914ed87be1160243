"""What one layer keeps of a sequence on one rank: keys and values in slots, in any order, and where each belongs.

Slots of all ranks are numbered together: slot ``s`` of rank ``r`` has the number ``s * size + r``. New tokens take ascending
numbers, so they go round the ranks, and every rank knows where each is without asking. Where queries look back only so far, the
numbers go round too: a new token takes the slot of one that no query can see any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge.attention.append import append

EMPTY = -1  # the segment of a slot without a token
_MANY = 4096  # slots; from here on their number is rounded up, so that a GPU can cut them into parts
_MULTIPLE = 256

Sum = Callable[[Tensor], Tensor]


class CacheSlots(NamedTuple):
    """Tokens that a rank holds: ``key [batch, slots, kv_heads, dim]``, ``value [batch, slots, kv_heads, value_dim]``, int32
    ``positions`` and ``segments [batch, slots]`` (:data:`EMPTY` where there is none)."""

    key: Tensor
    value: Tensor
    positions: Tensor
    segments: Tensor

    @property
    def slots(self) -> int:
        return self.key.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)

    def padded(self, slots: int) -> "CacheSlots":
        """With empty slots at the end, whose keys and values are 0: nothing sees them, but a product of a weight of 0 and NaN is
        NaN."""
        larger = [x.new_zeros(x.shape[0], slots, *x.shape[2:]) for x in self[:3]]
        larger.append(self.segments.new_full((self.segments.shape[0], slots), EMPTY))
        for whole, part in zip(larger, self, strict=True):
            whole[:, : part.shape[1]] = part
        return CacheSlots(*larger)


@dataclass
class Layer:
    """``first``: slots of each rank that the prompt takes. ``reach``: how far back a query looks; None: to the beginning.
    ``written``: whether keys were written once, for cross attention, and none are appended. ``appended``: tokens since the prompt,
    on all ranks together; ``furthest``: the most there have been. ``source``: the segments that it was filled with; layers filled
    with the same share their ids."""

    contents: CacheSlots
    rank: int
    size: int
    first: int
    reach: int | None = None
    written: bool = False
    appended: int = 0
    furthest: int = 0
    source: Tensor | None = field(default=None, repr=False)

    @property
    def slots(self) -> int:
        """Those for tokens. One more, the last, takes what other ranks keep, so that where a token goes is known to the device
        alone."""
        return self.contents.slots - 1

    @property
    def room(self) -> int | None:
        """How many tokens can still be appended; None: any number."""
        return None if self.reach is not None else (self.slots - self.first) * self.size - self.appended

    @property
    def at_once(self) -> int:
        """How many tokens can be appended in one call without taking the slot of one that its first query sees."""
        return self.slots * self.size - (self.reach or 0)

    def places(self, before: Tensor, tokens: int) -> Tensor:
        """The slots of the next tokens, int64 ``[tokens]``, after ``before`` appended ones, int64 ``[]``, on all ranks together."""
        number = before + torch.arange(tokens, device=before.device)
        slot = self.first + number // self.size
        return torch.where(number % self.size == self.rank, slot if self.reach is None else slot % self.slots, self.slots)

    def append(self, new: CacheSlots, places: Tensor, ids: bool = True) -> None:
        """Keeps this rank's share of ``new [batch, tokens, ...]``, which all ranks hold, at :meth:`places`. ``ids``: False where
        another layer, which shares its positions and segments with this one, has kept them."""
        append(self.contents[:2], new[:2], places)
        if ids:
            for whole, part in zip(self.contents[2:], new[2:], strict=True):
                whole.index_copy_(1, places, part)
            self.contents.segments[:, -1] = EMPTY
        self.appended += new.slots

    def crop(self, appended: int, end: Tensor, done: set[int]) -> None:
        """Empties the slots of tokens from ``end [batch, 1]`` on. ``done``: the addresses of shared ids of which it is done."""
        self.furthest, self.appended = max(self.furthest, self.appended), appended
        if (address := self.contents.segments.data_ptr()) not in done:
            self.contents.segments.masked_fill_(self.contents.positions >= end, EMPTY)
            done.add(address)

    def share_ids(self, other: "Layer") -> None:
        self.contents = CacheSlots(*self.contents[:2], *other.contents[2:])

    def copy_ids(self) -> None:
        """Shares no positions and segments from here on."""
        if self.source is not None:
            self.contents = CacheSlots(*self.contents[:2], *(x.clone() for x in self.contents[2:]))
            self.source = None

    def reorder(self, index: Tensor, done: set[int]) -> None:
        """In its own memory. ``done``: the addresses of what other layers share with this one and have reordered."""
        for x in self.contents:
            if x.data_ptr() not in done:
                x.copy_(x.index_select(0, index))
                done.add(x.data_ptr())

    def taken(self, index: Tensor) -> "Layer":
        """A copy with these batch entries."""
        return replace(self, contents=CacheSlots(*(x.index_select(0, index) for x in self.contents)), source=None)

    def grown(self, room: int) -> "Layer":
        """A copy that takes ``room`` tokens more."""
        if self.reach is not None or self.written:
            return self
        more = -(-(self.appended + room) // self.size)
        return replace(self, contents=self.contents.padded(_rounded(self.first + more + 1)), source=None)


def whole_layer(slots: CacheSlots, rank: int, size: int, room: int) -> Layer:
    """A layer that keeps everything: what a rank holds stays where it is."""
    return Layer(slots.padded(_rounded(slots.slots + -(-room // size) + 1)), rank, size, slots.slots)


def written_layer(slots: CacheSlots, rank: int, size: int) -> Layer:
    return Layer(slots.padded(_rounded(slots.slots)), rank, size, slots.slots, written=True)


def window_layer(prompt: CacheSlots, rank: int, size: int, reach: int, at_once: int, lengths: Tensor, add_up: Sum) -> Layer:
    """A layer that keeps what a future query can see, spread evenly over the ranks: of entry ``b`` the positions from
    ``lengths[b] - reach``. ``add_up``: the sum of a tensor over the ranks."""
    first, slots = -(-reach // size), -(-(reach + at_once) // size)
    last = _last(prompt, first * size, lengths, add_up)
    shard = CacheSlots(*(x[:, rank::size] for x in last))
    return Layer(shard.padded(max(first, slots) + 1), rank, size, first, reach)


def _last(prompt: CacheSlots, count: int, lengths: Tensor, add_up: Sum) -> CacheSlots:
    """The last ``count`` tokens of each entry, of all ranks, in order; empty slots where an entry is shorter."""
    begin = (lengths - count)[:, None]
    place = prompt.positions - begin
    place = torch.where((prompt.segments >= 0) & (place >= 0) & (place < count), place, count).long()
    rows = torch.arange(place.shape[0], device=place.device)[:, None]

    def gathered(x: Tensor) -> Tensor:
        target = x.new_zeros(x.shape[0], count + 1, *x.shape[2:])  # the last takes what is left out
        target[rows, place] = x
        return add_up(target[:, :count])

    key, value, segments = map(gathered, (prompt.key, prompt.value, prompt.segments - EMPTY))
    positions = (begin + torch.arange(count, device=begin.device)).to(torch.int32)
    return CacheSlots(key, value, positions, segments + EMPTY)


def _rounded(slots: int) -> int:
    return slots if slots < _MANY else -(-slots // _MULTIPLE) * _MULTIPLE
