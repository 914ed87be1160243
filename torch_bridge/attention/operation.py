"""Attention as an operation: its options, and what follows from them for operands of certain specs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
import torch
from jax.sharding import AbstractMesh

from jax_core.config import FwdParams, RingAttentionConfig
from jax_core.operands import GIVEN, Operands
from jax_core.options import Options, Placement
from jax_core.request.checks import check_operands
from jax_core.request.dispatch import SHARED_QUERIES
from jax_core.request.explain import Explanation, explanation_of, taken
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.pairs.rows import as_kernel_takes_them
from torch_bridge.attention.decoding import Decoding, decoding_of
from torch_bridge.attention.empty import Empty
from torch_bridge.backends.operation import GlobalProgram, Operation, Program, Request, Shapes, TensorLike, TensorSpec
from torch_bridge.call.sanity_checks import check_same_queries, check_shards
from torch_bridge.mesh.protocol import AnyRing, Tensors, tensors_per_sequence
from torch_bridge.mesh.rings import ProcessRing

OPERANDS = Operands._fields[:GIVEN]
QKV = (0, 1, 2)
A = TypeVar("A")  # the kind of array
VALUE, SINKS, ORIGIN = (OPERANDS.index(name) for name in ("value", "softmax_aux", "origin"))


@dataclass(frozen=True)
class Attention(Operation):
    """``options``: without ``mask_mod``, which is one of its ``predicates``; the arrays of a predicate follow the operands."""

    options: Options

    name = "ring_attention"
    operands = OPERANDS
    differentiated = QKV

    def __str__(self) -> str:
        """The options that differ from the defaults."""
        options = self.options
        settings = {name: value for name, value in vars(options).items() if value != getattr(Options, name)}
        settings |= {name: str(value) for name, value in settings.items() if name == "layout"}
        settings |= {name: getattr(value, "__qualname__", "given") for name, value in settings.items() if callable(value)}
        settings |= {"predicates": [str(predicate.token) for predicate in options.predicates]} if options.predicates else {}
        return str(settings)

    @property
    def is_process_local(self) -> bool:
        return bool(self.options.predicates or self.options.mask_builder)

    @property
    def captures_arrays(self) -> bool:
        """As a mask function may. No compiled graph has a call with one."""
        return bool(self.options.predicates)

    def check(self, operands: Sequence[TensorLike | None], ring: AnyRing) -> None:
        check_operands(Operands.of(operands), self.options.layout, tensors_per_sequence(ring))

    def results(self, specs: Sequence[TensorLike | None]) -> tuple[TensorSpec, ...]:
        """Of ``out`` and ``lse``."""
        query, _, value = Operands.of(specs).qkv
        batch, length, heads, _ = query.shape
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return TensorSpec((batch, length, heads, value.shape[-1]), query.dtype), TensorSpec((batch, heads, length), lse_dtype)

    def local(self, request: Request, place: Placement) -> "LocalAttention":
        spec, completed = make_spec(self.options, self.named(request.specs[: len(OPERANDS)]), place)
        built = completed.predicate_arrays[len(self.options.predicates) :]
        # NumPy arrays belong to no device.
        return LocalAttention(self, spec, tuple(tuple(np.asarray(array) for array in arrays) for arrays in built))

    def whole(self, request: Request, mesh: AbstractMesh | None, dim: int, platform: str) -> GlobalProgram:
        from torch_bridge.attention.whole import whole_attention

        return whole_attention(self.options, request.specs, mesh, dim, platform)

    def in_torch(self, request: Request, program: Program) -> Empty | Decoding | None:
        """A batch or a sequence of length 0 has no query-key pair; a GPU decodes on torch's stream, but by tiles of the user's."""
        if any(spec is not None and 0 in spec.shape[:2] for spec in request.specs[: len(QKV)]):
            return Empty(request.results, request.device, SINKS)
        cfg = self.options.cfg or RingAttentionConfig()
        return None if cfg.autotune or cfg.fwd_params != FwdParams() else decoding_of(program)

    @property
    def has_one_cotangent(self) -> bool:
        return not self.options.lse_gradient

    def check_ranks(self, request: Request, ring: ProcessRing, operands: Tensors) -> None:
        query, value = operands[0], operands[VALUE]
        assert query is not None and value is not None
        check_shards(ring, self.layout_in_use(request.specs), value)
        if self.shared_queries:
            check_same_queries(ring, query)

    def layout_in_use(self, specs: Sequence[TensorSpec | None]) -> str:
        """The layout; empty where nothing goes by it: no mask, or by position ids that say all that it would, or in any order."""
        options, present = self.options, {name for name, spec in zip(OPERANDS, specs, strict=False) if spec is not None}
        by_place = bool(present & {"bias", "mask", "documents"}) or options.mask_builder is not None
        static = options.causal or options.sliding_window is not None or options.chunk_size is not None or options.predicates
        by_position = (static or "alibi_slopes" in present) and "q_position_ids" not in present
        return str(options.layout) if (by_place or by_position) and not self.shared_queries else ""

    @property
    def shared_queries(self) -> bool:
        """Whether the queries are the same on all ranks."""
        return self.options.strategy in SHARED_QUERIES

    def fixed(self, specs: tuple[TensorSpec | None, ...]) -> Hashable:
        shapes = [None if spec is None else (spec.shape[2:], spec.dtype) for spec in specs[: len(QKV)]]
        return *shapes, *(spec is None for spec in specs)

    def flops(self, shapes: Shapes, tensors_per_sequence: int) -> tuple[int, int]:
        """All queries with all keys of the ring, whatever the masks: two products, and five in the backward, where the scores are
        computed again before dP and dV, dQ and dK."""
        (batch, queries, heads, dim), (_, keys, *_), (*_, value_dim) = Operands.of(shapes).qkv
        pairs = batch * heads * queries * keys * tensors_per_sequence
        return 2 * pairs * (dim + value_dim), 2 * pairs * (3 * dim + 2 * value_dim)

    def named(self, arrays: Sequence[A | None], built: tuple[tuple[np.ndarray, ...], ...] = ()) -> Operands[A]:
        """``arrays``, in the order of a request's specs, as operands. ``built``: the arrays of a mask builder, which come last."""
        lifted = (tuple(arrays[len(OPERANDS) :]),) if self.options.predicates else ()  # a mask function may have no arrays
        return Operands.of(arrays, (*lifted, *built))


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """A checked request as functions of this rank's JAX arrays."""

    attention: Attention
    spec: RingSpec
    built: tuple[tuple[np.ndarray, ...], ...]  # the arrays of a mask builder: constants of the program

    def __str__(self) -> str:
        return taken(self.spec)

    def explanation(self) -> Explanation:
        return explanation_of(self.attention.options, self.spec)

    def forward(self, *operands: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        inputs = as_kernel_takes_them(self.spec, self.attention.named(operands, self.built))
        return self.spec.strategy.forward(self.spec, inputs)

    def backward(self, wanted: Sequence[int], *arrays: jax.Array | None) -> list[jax.Array | None]:
        *operands, out, lse, dout, dlse = arrays
        assert out is not None and lse is not None and dout is not None
        inputs = as_kernel_takes_them(self.spec, self.attention.named(operands, self.built))
        gradients = self.spec.strategy.backward(self.spec, inputs, out, lse, dout, dlse)
        return [gradients.given[number] for number in wanted]
