"""The recurrences: each arranges its operands as the inputs of one chunked operator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import accumulation_dtype
from jax_core.masks.layout import Layout
from jax_core.recurrence import heads
from jax_core.recurrence.choice import STRATEGIES, prefix_bytes, ulysses_bytes
from jax_core.recurrence.chunks import Chunks, Inputs, chunked
from jax_core.recurrence.documents import resets
from jax_core.recurrence.layer import (
    Cotangents,
    Given,
    Layer,
    Operand,
    Results,
    Shaped,
    check_pieces,
    part_of_state,
)
from jax_core.recurrence.passes import backward, forward
from jax_core.recurrence.pieces import Pieces, pieces_of_a_rank
from jax_core.recurrence.prefix import transposed

CHUNK = 64
EPSILON = 1e-6  # of the l2 norm, as in fla and transformers
Arrange = Callable[["Recurrence", Mapping[str, Array]], Inputs]  # of operands [batch, length, ...] by name


class Operator(NamedTuple):
    """``like``: the operand that the output is like. ``state``: the dims of the state, which is key by value here."""

    signature: tuple[Operand, ...]
    like: str
    state: str
    arrange: Arrange


@dataclass(frozen=True)
class Recurrence(Layer):
    """``scale``: of the queries; None: ``1 / sqrt(key_dim)``. ``l2norm``: queries and keys are first divided by their norm.
    ``chunk``: tokens. ``strategy``: "auto" until :meth:`on_ring` has decided."""

    operator: str = ""
    scale: float | None = None
    l2norm: bool = False
    chunk: int = CHUNK
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"chunk_size must be a positive int, got {self.chunk!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")

    @property
    def name(self) -> str:
        return self.operator

    @property
    def signature(self) -> tuple[Operand, ...]:
        return OPERATORS[self.operator].signature

    @property
    def like(self) -> str:
        return OPERATORS[self.operator].like

    @property
    def state_dims(self) -> str:
        return OPERATORS[self.operator].state

    def on_ring(self, operands: Sequence[Shaped | None], sizes: dict[str, int], layout: Layout, size: int) -> "Recurrence":
        """With its strategy: "auto" is what sends fewer bytes of what is possible, "prefix" where both send as many."""
        strategy, shared = self.strategy, sizes["h"] % size == 0
        if size == 1:
            strategy = "prefix"
        elif strategy == "auto":
            fewer = shared and (layout == "striped" or self._ulysses_sends_less(operands, sizes, layout, size))
            strategy = "ulysses" if fewer else "prefix"
        if strategy == "prefix":
            check_pieces(layout, size)
        elif not shared:
            raise ValueError(
                f'strategy="ulysses" gives equally many heads to each of the {size} ranks: their number must be a multiple of '
                f'that, got {sizes["h"]} heads; use strategy="prefix", or a ring whose size divides them'
            )
        return replace(self, strategy=strategy)

    def kept_shape(self, sizes: dict[str, int], layout: Layout, size: int) -> tuple[int, ...]:
        """The states that enter this rank's pieces, or the whole sequence of its heads."""
        one = self.strategy == "ulysses"
        pieces, heads = (1, sizes["h"] // size) if one else (pieces_of_a_rank(layout, size), sizes["h"])
        return pieces, sizes["b"], heads, sizes["k"], sizes["v"]

    def forward(self, pieces: Pieces, given: Given) -> Results:
        if self.strategy == "ulysses":
            return heads.forward(self._alone, pieces, given)
        chunks, like = self._chunks(pieces, given.ids, given.operands), self.like_of(given.operands)
        state = given.state
        first = jnp.zeros_like(chunks.maps.e[0, 0]) if state is None else self._turned(state).astype(chunks.own.dtype)
        y, last, entering = forward(chunks, first, pieces)
        return Results(pieces.join(y).astype(like.dtype), self._turned(last), entering)

    def backward(self, pieces: Pieces, given: Given, kept: Array, d: Cotangents) -> tuple[list[Array | None], Array]:
        if self.strategy == "ulysses":
            return heads.backward(self._alone, pieces, given, kept, d)
        chunks, pull = jax.vjp(partial(self._chunks, pieces, given.ids), given.operands)
        dy = d.y if given.ids is None else _cleared(d.y, given.ids)
        total = jnp.zeros_like(kept[0])
        if self.final_state and d.last is not None:
            total = pieces.sum(self._turned(d.last).astype(kept.dtype), after=chunks.own)
        dchunks, dstate = backward(chunks, kept, pieces.split(dy.astype(kept.dtype)), total, pieces)
        return pull(dchunks)[0], part_of_state(pieces, self._turned(dstate), given.state)

    def _chunks(self, pieces: Pieces, ids: Array | None, operands: Sequence[Array | None]) -> Chunks:
        operator, dtype = OPERATORS[self.operator], accumulation_dtype(self.like_of(operands).dtype)
        named = {operand.name: x for operand, x in zip(operator.signature, operands, strict=True) if x is not None}
        if ids is not None:
            named = {name: _cleared(x, ids) if x.ndim >= 3 else x for name, x in named.items()}
        inputs = operator.arrange(self, {name: x.astype(dtype) for name, x in named.items()})
        if ids is not None:
            inputs = inputs._replace(g=_cleared(inputs.g, ids))  # padding leaves the state as it is
        inputs = jax.tree.map(pieces.split, inputs)
        starts = None if ids is None else resets(ids, pieces)
        return chunked(inputs, starts, min(self.chunk, pieces.piece))

    @property
    def _alone(self) -> "Recurrence":
        return replace(self, strategy="prefix")

    def _ulysses_sends_less(self, operands: Sequence[Shaped | None], sizes: dict[str, int], layout: Layout, size: int) -> bool:
        itemsize = max(4, self.like_of(operands).dtype.itemsize)  # of the accumulation
        prefix = prefix_bytes(sizes, self._map_size(operands, sizes), itemsize, pieces_of_a_rank(layout, size), size)
        return ulysses_bytes(self.signature, operands, self.like, size) < prefix

    def _map_size(self, operands: Sequence[Shaped | None], sizes: dict[str, int]) -> int:
        """The numbers of ``M`` of a head."""
        named = {operand.name: x for operand, x in zip(self.signature, operands, strict=True)}
        if "beta" in named:
            return sizes["k"] * sizes["k"]
        g = named.get("g")
        return 1 if g is None or len(g.shape) in (1, 3) else sizes["k"]

    def _turned(self, state: Array) -> Array:
        return transposed(state) if self.state_dims.endswith("vk") else state


def _cleared(x: Array, ids: Array) -> Array:
    """0 on padding, whatever was there."""
    return jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (x.ndim - 2)), x, 0)


def _attention(recurrence: Recurrence, named: Mapping[str, Array]) -> Inputs:
    """Of q, k, v, g and beta, of which the last two may be absent."""
    q, k, v = (named[name] for name in "qkv")
    if recurrence.l2norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if recurrence.scale is None else recurrence.scale)
    beta = named["beta"][..., None] if "beta" in named else None
    return _of_heads(q, k, v, _decay(named.get("g"), v), beta, None)


def _decay(g: Array | None, v: Array) -> Array:
    """``g [(batch, length,) heads (, key_dim)]`` as ``[batch, length, heads, 1 | key_dim]``."""
    if g is None:
        return jnp.zeros((*v.shape[:3], 1), v.dtype)
    g = g[..., None] if g.ndim in (1, 3) else g
    return jnp.broadcast_to(g, (*v.shape[:3], g.shape[-1]))


def _state_space(recurrence: Recurrence, named: Mapping[str, Array]) -> Inputs:
    x, dt, a, b, c = (named[name] for name in ("x", "dt", "A", "B", "C"))
    d = named.get("D")
    skip = None if d is None else x * (d[:, None] if d.ndim == 1 else d)
    return _of_heads(c, b, x * dt[..., None], (dt * a)[..., None], None, skip)


def _of_heads(q: Array, k: Array, v: Array, g: Array, beta: Array | None, skip: Array | None) -> Inputs:
    """With each key head as often as there are heads that share it."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x if shared == 1 else jnp.repeat(x, shared, axis=2) for x in (q, k))
    return Inputs(q, k, v, g, beta, skip)


_QKV = Operand("q", ("btnk",)), Operand("k", ("btnk",)), Operand("v", ("bthv",))
_BETA = Operand("beta", ("bth",))
OPERATORS = {
    "linear_attention": Operator(
        (*_QKV, Operand("g", ("h", "hk", "bth", "bthk"), optional=True)), "v", "bhkv", _attention
    ),
    "gated_delta_rule": Operator((*_QKV, Operand("g", ("bth",), optional=True), _BETA), "v", "bhkv", _attention),
    "kda": Operator((*_QKV, Operand("g", ("bthk",)), _BETA), "v", "bhkv", _attention),
    "ssd": Operator(
        (
            Operand("x", ("bthv",)),
            Operand("dt", ("bth",)),
            Operand("A", ("h",)),
            Operand("B", ("btnk",)),
            Operand("C", ("btnk",)),
            Operand("D", ("h", "hv"), optional=True),
        ),
        "x",
        "bhvk",
        _state_space,
    ),
}  # fmt: skip
