"""The recurrences: each arranges its operands as the inputs of one chunked operator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.recurrence.chunks import Chunks, Inputs, chunked
from jax_core.recurrence.documents import resets
from jax_core.recurrence.layer import Layer, Operand, Results, accumulation
from jax_core.recurrence.passes import backward, forward
from jax_core.recurrence.pieces import Pieces
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
    ``chunk``: tokens."""

    operator: str = ""
    scale: float | None = None
    l2norm: bool = False
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"chunk_size must be a positive int, got {self.chunk!r}")

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

    def kept_shape(self, sizes: dict[str, int], pieces: int) -> tuple[int, ...]:
        return pieces, sizes["b"], sizes["h"], sizes["k"], sizes["v"]

    def forward(self, pieces: Pieces, operands: Sequence[Array | None], state: Array | None, ids: Array | None) -> Results:
        chunks, like = self._chunks(pieces, ids, operands), self._like(operands)
        first = jnp.zeros_like(chunks.maps.e[0, 0]) if state is None else self._turned(state).astype(chunks.own.dtype)
        y, last, entering = forward(chunks, first, pieces)
        return Results(pieces.join(y).astype(like.dtype), self._turned(last), entering)

    def backward(
        self,
        pieces: Pieces,
        operands: Sequence[Array | None],
        state: Array | None,
        ids: Array | None,
        residuals: Array,
        dy: Array,
        dlast: Array | None,
    ) -> tuple[list[Array | None], Array]:
        chunks, pull = jax.vjp(partial(self._chunks, pieces, ids), operands)
        dy = dy if ids is None else _cleared(dy, ids)
        total = jnp.zeros_like(residuals[0])
        if self.final_state and dlast is not None:
            total = pieces.sum(self._turned(dlast).astype(residuals.dtype), after=chunks.own)
        dchunks, dstate = backward(chunks, residuals, pieces.split(dy.astype(residuals.dtype)), total, pieces)
        dstate = self._turned(jnp.where(pieces.numbers[0] == 0, dstate, 0))
        return pull(dchunks)[0], dstate if state is None else dstate.astype(state.dtype)

    def _chunks(self, pieces: Pieces, ids: Array | None, operands: Sequence[Array | None]) -> Chunks:
        operator, dtype = OPERATORS[self.operator], accumulation(self._like(operands).dtype)
        named = {operand.name: x for operand, x in zip(operator.signature, operands, strict=True) if x is not None}
        if ids is not None:
            named = {name: _cleared(x, ids) if x.ndim >= 3 else x for name, x in named.items()}
        inputs = operator.arrange(self, {name: x.astype(dtype) for name, x in named.items()})
        if ids is not None:
            inputs = inputs._replace(g=_cleared(inputs.g, ids))  # padding leaves the state as it is
        inputs = jax.tree.map(pieces.split, inputs)
        starts = None if ids is None else resets(ids, pieces)
        return chunked(inputs, starts, min(self.chunk, pieces.piece))

    def _like(self, operands: Sequence[Array | None]) -> Array:
        names = [operand.name for operand in self.signature]
        like = operands[names.index(self.like)]
        assert like is not None
        return like

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
