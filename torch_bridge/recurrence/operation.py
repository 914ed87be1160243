"""A layer with a state as an operation of the bridge."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch

from jax_core.masks.layout import Layout
from jax_core.options import Placement
from jax_core.recurrence.layer import Cotangents, Given, Layer, Operand
from jax_core.recurrence.maps import Maps
from jax_core.recurrence.pieces import Pieces, pieces_of
from torch_bridge.backends.operation import Operation, Program, Request, Results, TensorLike, TensorSpec
from torch_bridge.call.sanity_checks import check_shards, check_shared
from torch_bridge.mesh.protocol import AnyRing, Tensors
from torch_bridge.mesh.rings import ProcessRing


@dataclass(frozen=True)
class LayerWithState(Operation):
    """``size``: of the ring. Its operands are the layer's, the state that enters the sequence, and the tokens' ids; its results the
    layer's (:class:`jax_core.recurrence.layer.Results`)."""

    layer: Layer
    layout: Layout
    size: int

    def __str__(self) -> str:
        settings = {name: value for name, value in vars(self.layer).items() if value is not None}
        return str(settings | {"layout": str(self.layout)})

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.layer.name

    @property
    def operands(self) -> tuple[str, ...]:  # type: ignore[override]
        return *(operand.name for operand in self.layer.signature), "initial_state", "segment_ids"

    @property
    def differentiated(self) -> tuple[int, ...]:  # type: ignore[override]
        """The one whose gradient needs all that is sent in a backward."""
        return (self.operands.index(self.layer.like),)

    @property
    def has_one_cotangent(self) -> bool:
        return not self.layer.final_state

    def check(self, operands: Sequence[TensorLike | None], ring: AnyRing) -> None:
        *inputs, state, ids = operands
        sizes = self.layer.sizes(inputs, state, ids)
        self.layer.on_ring(inputs, sizes, self.layout, ring.size)
        pieces_of(None, ring.size, self.layout, sizes["t"])

    def results(self, specs: Sequence[TensorLike | None]) -> tuple[TensorSpec, ...]:
        *inputs, state, ids = specs
        sizes, like = self.layer.sizes(inputs, state, ids), self.layer.like_of(specs)
        dtype = like.dtype if self.layer.name == "causal_conv1d" else accumulation(like.dtype)
        state_shape = tuple(sizes[letter] for letter in self.layer.state_dims)
        layer = self.layer.on_ring(inputs, sizes, self.layout, self.size)
        residuals = TensorSpec(layer.kept_shape(sizes, self.layout, self.size), dtype)
        return TensorSpec(tuple(like.shape), like.dtype), TensorSpec(state_shape, dtype), residuals

    def local(self, request: Request, place: Placement) -> "LocalLayer":
        self.check(request.specs, request.ring)
        *inputs, state, ids = request.specs
        sizes = self.layer.sizes(inputs, state, ids)
        layer = self.layer.on_ring(inputs, sizes, self.layout, place.size)
        return LocalLayer(layer, pieces_of(place.axis_name, place.size, self.layout, sizes["t"]))

    def in_torch(self, request: Request, program: Program) -> "Empty | None":
        nothing = 0 in self.layer.like_of(request.specs).shape[:2]
        return Empty(request.results, request.device, len(self.operands) - 2) if nothing else None

    def check_ranks(self, request: Request, ring: ProcessRing, operands: Tensors) -> None:
        sharded = operands[self.operands.index(self.layer.sharded)]
        assert sharded is not None
        check_shards(ring, str(self.layout), sharded)
        *inputs, state, _ = operands
        given = ((each, x) for each, x in zip(self.layer.signature, inputs, strict=True) if x is not None)
        shared = {each.name: x for each, x in given if _has_no_tokens(each, x)}
        if state is not None:
            shared["initial_state"] = state
        if shared:
            check_shared(ring, self.name, shared)

    def fixed(self, specs: tuple[TensorSpec | None, ...]) -> Hashable:
        return tuple(None if spec is None else (spec.shape[2:], spec.dtype) for spec in specs)


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """A checked request as functions of this rank's JAX arrays."""

    layer: Layer
    pieces: Pieces

    def __str__(self) -> str:
        return "plain JAX"

    def explanation(self) -> str:
        by = f"by {self.layer.by}" if isinstance(self.layer, Maps) else "plain JAX, in chunks of tokens"
        return f"{self.layer.name}: {by}"

    def forward(self, *operands: jax.Array | None) -> tuple[jax.Array, ...]:
        return tuple(self.layer.forward(self.pieces, _given(operands)))

    def backward(self, wanted: Sequence[int], *arrays: jax.Array | None) -> list[jax.Array | None]:
        *operands, _, last, residuals, dy, dlast, _ = arrays
        assert last is not None and residuals is not None and dy is not None
        given = _given(operands)
        if dlast is None and self.layer.final_state:  # on another rank it may be there, and what is sent must not depend on that
            dlast = jnp.zeros_like(last)
        gradients, dstate = self.layer.backward(self.pieces, given, residuals, Cotangents(dy, dlast))
        every = [*gradients, None if given.state is None else dstate, None]
        return [every[number] for number in wanted]


def _given(operands: Sequence[jax.Array | None]) -> Given:
    """With ids of each batch entry."""
    *inputs, state, ids = operands
    assert inputs[0] is not None
    return Given(tuple(inputs), state, None if ids is None else jnp.broadcast_to(ids, inputs[0].shape[:2]))


@dataclass(frozen=True, eq=False)
class Empty:
    """The program of a batch or a sequence without tokens: the state passes through. ``state``: its index among the operands."""

    specs: tuple[TensorSpec, ...]
    device: torch.device
    state: int
    operators: None = None

    def forward(self, operands: Tensors) -> Results:
        y, last, residuals = (torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in self.specs)
        state = operands[self.state]
        return y, last if state is None else last + state, residuals

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        gradients = {number: torch.zeros_like(x) for number in wanted if (x := operands[number]) is not None}
        if self.state in gradients and cotangents[1] is not None:
            gradients[self.state] += cotangents[1]
        return list(gradients.values())


def _has_no_tokens(operand: Operand, x: torch.Tensor) -> bool:
    """Whether an operand is the same on all ranks: none of its dimensions is the sequence."""
    return all({*"tl"}.isdisjoint(dims) for dims in operand.dims if len(dims) == x.ndim)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
