"""``KVCache``: the keys and values of a sequence, spread over the ranks of a ring, for generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ring_attn.functional import ring_attention
from ring_attn.generation.checks import check_appended, check_cropped, check_operands, check_prompt, reach_of
from ring_attn.generation.layer import EMPTY, CacheSlots, Layer, Sum, whole_layer, window_layer, written_layer
from ring_attn.ring import Ring
from ring_attn.sharding.reduction import agree, sum_over_ring
from torch_bridge.backends.capture import is_captured
from torch_bridge.tracing import untraced

_SAME = "every rank of the ring must make the same call of its KVCache"
_BY_POSITION = ("sliding_window", "chunk_size", "alibi_slopes", "mask_mod")  # options that read positions


class Prompt(NamedTuple):
    """This rank's shard of the prompts, each ``[batch, shard length]`` in the layout's order: tokens, int64 positions, int32
    segments (-1 on padding)."""

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor


class _New(NamedTuple):
    """What layers ask for in turn: how many tokens were appended before the new ones, as an int and on the device; positions and
    segments of new tokens, int32 ``[batch, tokens]``; the slots that they take in layers of a kind; where ids are kept."""

    appended: int
    before: Tensor
    positions: Tensor
    segments: Tensor
    places: dict[tuple[int, int, bool], Tensor]
    stored: set[int]


@dataclass(eq=False)
class KVCache:
    """Keys and values of every layer, spread over the ranks of ``ring``.

    ``max_length``: the most tokens of an entry, prompt and new ones together. A layer has room for them from the start, so that one
    compiled program serves every step. ``at_once``: the most new tokens in one call, where a layer has a window.

    All ranks make the same calls. Within ``with cache.prompt(tokens) as part`` the model runs on this rank's part of the prompts:
    :meth:`attend` is then the ring's causal attention, and keeps its keys and values. Afterwards the model runs on new tokens,
    which are the same on all ranks: :meth:`attend` then appends theirs, each on one rank in turn, and attends to the whole
    (``strategy="decode"``). What is stored where: docs/generation.md.

    Raises ValueError for sizes that are not positive.
    """

    ring: Ring
    max_length: int
    at_once: int = 8
    layers: dict[int, Layer] = field(default_factory=dict, repr=False)
    lengths: Tensor | None = field(default=None, repr=False)  # int64 [batch]: tokens of each entry before the appended ones
    longest: int = 0  # the largest of them
    segments: Tensor | None = field(default=None, repr=False)  # int32 [batch]: of new tokens
    _documents: bool = False  # whether prompts had segments of their own
    _prompt: Prompt | None = field(default=None, repr=False)
    _new: _New | None = field(default=None, repr=False)
    _count: Tensor | None = field(default=None, repr=False)  # int64 []: of appended tokens, where a CUDA graph reads it
    _first: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False
    )  # by tokens: positions, segments of the first
    _numbers: "WeakKeyDictionary[nn.Module, int]" = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.ring, Ring):
            raise ValueError(f"a KVCache is made for a ring_attn.Ring, got {type(self.ring).__name__}; Ring(mesh) makes one")
        for name in ("max_length", "at_once"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Between two steps. Modules ask for their numbers anew, in the same order."""
        return {**vars(self), "_numbers": None, "_new": None, "_count": None, "_first": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _numbers=WeakKeyDictionary())

    @property
    def prefilling(self) -> bool:
        """Whether the model now runs on the prompts."""
        return self._prompt is not None

    @property
    def appended(self) -> int:
        """How many tokens every layer has appended to each entry."""
        counts = self.counts()
        if len(set(counts.values())) > 1:
            raise ValueError(f"every layer must append the same tokens, but the layers have appended {counts}")
        return next(iter(counts.values()), 0)

    @property
    def nbytes(self) -> int:
        """The memory of this rank's slots."""
        return sum(layer.contents.nbytes for layer in self.layers.values())

    @contextmanager
    def prompt(self, input_ids: Tensor, lengths: Tensor | None = None, segment_ids: Tensor | None = None) -> Iterator[Prompt]:
        """This rank's shard of the prompts; the block runs the model on it, once.

        Every rank passes the same whole ``input_ids [batch, seq]``, padded on the right; ``lengths [batch]``: of each prompt (None:
        none is padded); ``segment_ids [batch, seq]``: documents that do not see one another, of which new tokens continue the last.
        Raises ValueError for other shapes, for more than ``max_length`` tokens, and in a cache that has had a prompt.
        """
        check_prompt(input_ids, lengths, segment_ids, self.max_length)
        if self.lengths is not None:
            raise ValueError("this cache has had its prompt; make a new KVCache for another one")
        (batch, length), device = input_ids.shape, input_ids.device
        self.begin(torch.full((batch,), length, device=device) if lengths is None else lengths.to(device, torch.int64))
        assert self.lengths is not None
        self._documents = segment_ids is not None
        whole = torch.zeros(batch, length, dtype=torch.int32, device=device) if segment_ids is None else segment_ids.to(torch.int32)
        self.segments = _last(whole, self.lengths)
        whole = whole.masked_fill(torch.arange(length, device=device) >= self.lengths[:, None], EMPTY)
        positions = self.ring.positions(length, device=device).clamp_max(max(0, length - 1)).expand(batch, -1)
        self._prompt = Prompt(self._shard(input_ids, 0), positions, self._shard(whole, EMPTY))
        try:
            yield self._prompt
        finally:
            self._prompt = None

    def begin(self, lengths: Tensor) -> None:
        """For prompts whose keys are given by :meth:`keep`: entries of ``lengths [batch]`` tokens, int64, on the keys' device."""
        self.lengths, self.longest = lengths.clone(), int(lengths.max())
        self.segments = torch.zeros(len(lengths), dtype=torch.int32, device=lengths.device)

    def positions(self, tokens: int = 1) -> Tensor:
        """The positions of the next tokens, int64 ``[batch, tokens]``: in each entry they follow its own last token."""
        return self._positions(self._appended_on_device(self.appended), tokens)

    def counts(self) -> dict[int, int]:
        """How many tokens each layer that appends any has appended."""
        return {number: layer.appended for number, layer in self.layers.items() if not layer.written}

    def set_counts(self, counts: dict[int, int]) -> None:
        """As where layers appended tokens in a CUDA graph, which counts on the device alone, or did not, as it was captured."""
        for number, appended in counts.items():
            self.layers[number].appended = appended
        self._new = None

    def memory(self) -> tuple[int, ...]:
        """Where a step finds what it reads and writes: what a CUDA graph goes by."""
        slots = (x for layer in self.layers.values() for x in (layer.contents.key, layer.contents.positions))
        ids = (x for x in (self.lengths, self.segments, *self._first.get(1, ())) if x is not None)
        return tuple(x.data_ptr() for x in (*slots, *ids))

    def layer_of(self, module: nn.Module) -> int:
        """The number of a module's layer: modules are numbered in the order in which they first ask."""
        return self._numbers.setdefault(module, len(self._numbers))

    @untraced  # of a CUDA graph nothing may be kept for the next step: it is written again
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Attention of ``q [batch, tokens, heads, dim]`` to all that ``layer`` has seen: ``[batch, tokens, heads, value_dim]``.

        On the prompts q, k and v are this rank's shards. Afterwards they are the new tokens', the same on every rank; several at
        once see one another causally. Without k and v: cross attention to what :meth:`write` has kept, every key of which is seen.
        ``segment_ids``: int ``[batch, tokens]`` of new tokens, negative where an entry has none; by default that of the prompt's
        last token. ``options`` as of :func:`ring_attn.ring_attention`: scale, softcap, sinks, alibi_slopes, sliding_window,
        chunk_size, mask_mod, platform, cfg, return_lse, and on the prompts strategy and deterministic.

        Raises ValueError for a layer without keys, shapes that do not fit what it holds, more new tokens than there is room for,
        a window other than the prompts', and operands with a gradient, because a cache keeps none.
        """
        check_operands(q, k, v)
        if self.prefilling:
            return self._attend_in_prompt(layer, q, k, v, options)
        if layer not in self.layers and self.lengths is not None and not self.longest and k is not None and v is not None:
            nothing = self.lengths.new_zeros(k.shape[0], 0)
            self.keep(layer, k[:, :0], v[:, :0], nothing, nothing, reach_of(options, self.max_length))
        cached = self._layer(layer, options)
        positions, segments = self._of_new(cached, q, segment_ids)
        if k is not None and v is not None:
            new = CacheSlots(k, v, positions, segments)
            check_appended(layer, cached, new, self.longest, self.max_length)
            self._append(cached, new)
        elif not cached.written:
            raise ValueError(f"layer {layer} was filled by self-attention, which needs k and v of the new tokens; got none")
        slots = cached.contents
        options |= dict(q_segment_ids=segments, kv_segment_ids=slots.segments)
        # One new token sees all the others, wherever they are.
        if not cached.written and (q.shape[1] > 1 or any(options.get(name) is not None for name in _BY_POSITION)):
            options |= dict(causal=True, q_position_ids=positions, kv_position_ids=slots.positions)
        options |= dict(mesh=self.ring.mesh, mesh_dim=self.ring.mesh_dim, strategy="decode")
        return ring_attention(q, slots.key, slots.value, **options)

    @untraced
    def write(self, layer: int, k: Tensor, v: Tensor, segment_ids: Tensor | None = None) -> None:
        """Keeps keys and values for cross attention: this rank's shard of them, ``[batch, shard length, kv_heads, dim]``, in any
        order, of one shape on all ranks. ``segment_ids [batch, shard length]``: negative on padding, which is not seen, else 0."""
        check_operands(k, v)
        zeros = torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        slots = CacheSlots(k, v, zeros, zeros if segment_ids is None else segment_ids.to(torch.int32))
        self.layers[layer] = written_layer(slots, self.ring.rank, self.ring.size)

    @untraced
    def keep(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, segments: Tensor, reach: int | None = None) -> None:
        """Fills a layer with this rank's tokens before the appended ones, in any order: ``k``, ``v [batch, tokens, kv_heads,
        dim]``, integers ``positions``, ``segments [batch, tokens]`` (-1: padding). :meth:`attend` does so on the prompts.

        ``reach``: how far back a query looks. Only that much is then kept, spread evenly over the ranks: a ring call."""
        slots = CacheSlots(k, v, positions.to(torch.int32), segments.to(torch.int32))
        rank, size = self.ring.rank, self.ring.size
        if reach is None:
            self.layers[layer] = whole_layer(slots, rank, size, self.max_length - self.longest)
        else:
            assert self.lengths is not None
            add_up = self._add_up(layer, k.device)
            self.layers[layer] = window_layer(slots, rank, size, reach, self.at_once, self.lengths, add_up)
        twins = (other for other in self.layers.values() if other.source is segments and other.reach == reach)
        if (twin := next(twins, None)) is not None:
            self.layers[layer].share_ids(twin)
        self.layers[layer].source = segments

    def fork(self, index: Tensor) -> "KVCache":
        """A second cache of the batch entries ``index [new batch]`` (int64, the same on all ranks), as
        where one prompt is continued in several ways. Its memory is its own."""
        self._check_entries(index)
        layers = {number: layer.taken(index) for number, layer in self.layers.items()}
        lengths, segments = (None if x is None else x.index_select(0, index) for x in (self.lengths, self.segments))
        return replace(self, layers=layers, lengths=lengths, segments=segments, _new=None, _first={}, _count=None)

    def reorder(self, index: Tensor) -> None:
        """The batch entries become those of ``index [batch]`` (int64), as after a step of a beam search."""
        if self.lengths is None or len(index) != len(self.lengths):
            new = self.fork(index)
            self.layers, self.lengths, self.segments, self._first = new.layers, new.lengths, new.segments, {}
        else:
            self._check_entries(index)
            done: set[int] = set()
            for layer in self.layers.values():
                layer.reorder(index, done)
            for x in (self.lengths, self.segments, *(ids for first in self._first.values() for ids in first)):
                if x is not None:
                    x.copy_(x.index_select(0, index))
        self._new = None

    def crop(self, appended: int) -> None:
        """Keeps the first ``appended`` tokens after the prompt of each entry, as where those of a draft were not taken. Raises
        ValueError for more than there are, and where a layer with a window gives back more than it takes in one call
        (``at_once``): what these saw is gone."""
        check_cropped(self.layers, self.appended, appended)
        end, done = self._positions(appended, 1), set[int]()
        for layer in self.layers.values():
            if not layer.written:
                layer.crop(appended, end, done)
        self._appended_on_device(appended)
        self._new = None

    def grow(self, max_length: int) -> None:
        """Makes room for ``max_length`` tokens of an entry. The next step compiles a program for the new size: grow rarely."""
        if max_length < self.max_length:
            raise ValueError(f"a cache only grows: max_length is {self.max_length}, got {max_length}")
        room = max_length - self.longest - self.appended
        self.layers = {number: layer.grown(room) for number, layer in self.layers.items()}
        self.max_length = max_length

    def _check_entries(self, index: Tensor) -> None:
        if not self.layers or index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(f"batch entries are chosen by int64 [entries], in a cache with layers; got {index.dtype}")
        if (ring := self.ring.processes).size > 1:
            agree(ring, index.device, f"batch entries {index.tolist()} of a KVCache", _SAME)

    def _attend_in_prompt(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, options: dict[str, Any]) -> Any:
        assert self._prompt is not None
        _, positions, segments = self._prompt
        if q.shape[:2] != positions.shape:
            raise ValueError(f"on the prompts q must be this rank's shard {list(positions.shape)}, got {list(q.shape[:2])}")
        if k is None or v is None:
            slots = self._layer(layer, {}).contents
            # No mask goes by these positions, but with them the keys need not lie in the ring's layout.
            options |= dict(q_position_ids=positions, kv_position_ids=slots.positions)
            options |= dict(q_segment_ids=segments.clamp_max(0), kv_segment_ids=slots.segments)
            return self.ring.attention(q, slots.key, slots.value, **options)
        if layer in self.layers:
            raise ValueError(f"layer {layer} has had the prompt: the model runs on it once")
        self.keep(layer, k, v, positions, segments, reach_of(options, self.max_length))
        if self._documents:  # otherwise all padding is on the right, where nothing causal sees it
            options |= dict(q_segment_ids=segments, kv_segment_ids=segments)
        return self.ring.attention(q, k, v, causal=True, **options)

    def _layer(self, number: int, options: dict[str, Any]) -> Layer:
        layer = self.layers.get(number)
        if layer is None:
            raise ValueError(
                f"layer {number} holds no keys (those that do: {sorted(self.layers)}): run the model within `with "
                "cache.prompt(tokens)` first, or give it the keys of cross attention with cache.write"
            )
        reach = reach_of(options, self.max_length)
        if layer.reach is not None and (reach is None or reach > layer.reach):
            raise ValueError(
                f"layer {number} keeps {layer.reach} tokens before a query, but this call looks {reach} back (None: all)"
            )
        return layer

    def _of_new(self, layer: Layer, q: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = q.shape[:2]
        if segment_ids is not None and segment_ids.shape != shape:
            raise ValueError(f"segment_ids must be {list(shape)}, one for each new token; got {list(segment_ids.shape)}")
        if layer.written:
            zeros = torch.zeros(shape, dtype=torch.int32, device=q.device)
            return zeros, zeros if segment_ids is None else segment_ids.to(torch.int32)
        new = self._new
        if new is None or new.appended != layer.appended or new.positions.shape != shape:
            # Each operation costs the host more than it costs a GPU, so the first positions are kept.
            if shape[1] not in self._first:
                assert self.segments is not None
                first = self._positions(0, shape[1]).to(torch.int32)
                self._first[shape[1]] = first, self.segments[:, None].expand(shape).contiguous()
            first, segments = self._first[shape[1]]
            before = self._appended_on_device(layer.appended).clone()
            assert self._count is not None
            self._count += shape[1]
            new = self._new = _New(layer.appended, before, (first + before).to(torch.int32), segments, {}, set())
        return new.positions, new.segments if segment_ids is None else segment_ids.to(torch.int32)

    def _append(self, layer: Layer, new: CacheSlots) -> None:
        step, kind = self._new, (layer.first, layer.slots, layer.reach is None)
        assert step is not None
        if kind not in step.places:
            step.places[kind] = layer.places(step.before, new.slots)
        places = step.places[kind]
        if new.segments is not step.segments:  # segments of the caller's
            layer.copy_ids()
            return layer.append(new, places)
        stored, memory = step.stored, layer.contents.segments.data_ptr()
        layer.append(new, places, ids=memory not in stored)
        return stored.add(memory)

    def _appended_on_device(self, appended: int) -> Tensor:
        """The count that a CUDA graph reads and adds to. Outside of one it is what the host knows."""
        device = self._lengths.device
        if self._count is None:
            self._count = torch.zeros((), dtype=torch.int64, device=device)
        if not is_captured(device):
            self._count.fill_(appended)
        return self._count

    @property
    def _lengths(self) -> Tensor:
        if self.lengths is None:
            raise ValueError("the cache has had no prompt: run the model within `with cache.prompt(tokens)` first")
        return self.lengths

    def _positions(self, appended: Tensor | int, tokens: int) -> Tensor:
        return self._lengths[:, None] + appended + torch.arange(tokens, device=self._lengths.device)

    def _shard(self, whole: Tensor, fill: int) -> Tensor:
        return self.ring.shard(self.ring.pad(whole, value=fill))

    def _add_up(self, layer: int, device: torch.device) -> Sum:
        ring = self.ring.processes
        if ring.size == 1:
            return lambda x: x
        agree(ring, device, f"layer {layer} of a KVCache", _SAME)
        return lambda x: sum_over_ring(x, ring, "KVCache", f"the last tokens of layer {layer}, {list(x.shape)}")


def _last(segments: Tensor, lengths: Tensor) -> Tensor:
    """The segment of each entry's last token; 0 for one without tokens."""
    if not segments.shape[1]:
        return segments.new_zeros(segments.shape[0])
    last = segments.gather(1, (lengths - 1).clamp_min(0)[:, None])[:, 0]
    return torch.where(lengths > 0, last, 0)
