"""The contract between a request and a strategy: a spec and local shards in, the attention of this rank's queries out.

A strategy is a package with

- ``HANDLES``: the features (``request.features``) that it or its kernel handles. A request for any other is refused;
- ``IN_PLACE_OF_A_KERNEL``: those of them that its kernel need not handle, because the strategy does;
- ``kernel_problem(problem) -> Problem``: what it asks of its kernel: the lengths, heads and features of the calls that it makes;
- ``OWN_PLATFORM``: None for a strategy that runs the chosen kernel, else the platform of the strategy's own kernel;
- ``unsupported(problem, forward, backward) -> str | None``: None, or in words why it cannot do this with these parameters;
- ``default_params(problem) -> (FwdParams, BwdParams)``: what it uses if the caller gives none; its kernel completes them;
- ``forward(spec, operands) -> (out, lse)``: attention of the local queries over the whole sequence. ``out [batch, q_length, heads,
  value_dim]`` in the query's dtype; ``lse [batch, heads, q_length]``, natural log, float32 (float64 for float64 inputs), ``-inf``
  where a row saw neither key nor sink (its ``out`` is 0);
- ``backward(spec, operands, out, lse, dout, dlse=None) -> Operands``: the gradients of ``operands``, each in its operand's shape
  and dtype; None for integer operands. ``out``, ``lse`` are the results of ``forward``; ``dout``, ``dlse`` (may be None) their
  cotangents. The gradient of an operand that ranks share (sinks, slopes) is this rank's part of the sum.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Extras, Kernel, Problem, Residuals, Scores
from jax_core.masks.layout import Layout


class Operands(NamedTuple):
    """The arrays of one attention, as local shards; all but the first three may be None.

    ``query [batch, q_length, heads, dim]``; ``key [batch, k_length, kv_heads, dim]``;
    ``value [batch, k_length, kv_heads, value_dim]``; ``softmax_aux [heads] | [sinks] | [heads, sinks]``; ``bias`` (float) and
    ``mask`` (bool) broadcast to ``[batch, heads, q_length, keys of the whole sequence]``, rows in shard order and columns in
    sequence order; ids int32 ``[length] | [batch|1, length]``; ``alibi_slopes [heads] | [batch|1, heads]``; ``dropout_seed`` uint32
    ``[2]``; ``origin`` int32 ``[2]``, the first batch entry and head held here; ``rank`` int32 ``[1]``, this device's rank in the
    ring (None: ``lax.axis_index`` gives it); ``predicate_arrays`` as in :class:`Extras`.
    """

    query: Array
    key: Array
    value: Array
    softmax_aux: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    q_segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    q_position_ids: Array | None = None
    kv_position_ids: Array | None = None
    alibi_slopes: Array | None = None
    dropout_seed: Array | None = None
    origin: Array | None = None
    rank: Array | None = None
    predicate_arrays: tuple[tuple[Array | np.ndarray, ...], ...] = ()

    @property
    def extras(self) -> Extras:
        """What a kernel takes beside the shards, not yet cut to a pair of them."""
        return Extras(*(getattr(self, name) for name in Extras._fields))


@dataclass(frozen=True)
class RingSpec:
    """Everything static about one attention: equal specs and shapes share one compiled program.

    ``kernel``: what computes a pair of shards; None for a strategy with a kernel of its own. ``backend``: "cpu", "gpu", "tpu".
    ``size``: how many ranks; ``sizes``: along each axis, the first of which is the major one. ``lse_gradient``: whether the LSE may
    have a cotangent; if False, one passed anyway is ignored.
    """

    scores: Scores
    strategy: "Strategy"
    kernel: Kernel | None
    backend: str
    layout: Layout = "contiguous"
    axis_name: str | tuple[str, ...] | None = None
    size: int = 1
    sizes: tuple[int, ...] = ()
    fwd_params: FwdParams = FwdParams()
    bwd_params: BwdParams = BwdParams()
    fused_backward: bool = False
    deterministic: bool = False
    lse_gradient: bool = True


class Strategy(Protocol):
    """What a strategy's module, or an object, provides."""

    @property
    def HANDLES(self) -> frozenset[str]: ...

    @property
    def IN_PLACE_OF_A_KERNEL(self) -> frozenset[str]: ...

    @property
    def OWN_PLATFORM(self) -> str | None: ...

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None: ...

    def default_params(self, problem: Problem) -> tuple[FwdParams, BwdParams]: ...

    def kernel_problem(self, problem: Problem) -> Problem: ...

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]: ...

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands: ...


def same_problem(problem: Problem) -> Problem:
    """``kernel_problem`` of strategies whose kernel gets pairs of shards as they are."""
    return problem


def make_residuals(out: Array, lse: Array, dout: Array, dlse: Array | None) -> Residuals:
    """What kernels need per query row, computed once for all steps. ``out``, ``lse``: the results of the whole forward, ``-inf``
    where a row saw no key; ``dout``, ``dlse`` (or None): their cotangents."""
    delta = jnp.swapaxes((out.astype(lse.dtype) * dout.astype(lse.dtype)).sum(-1), 1, 2)
    delta = delta if dlse is None else delta - dlse.astype(lse.dtype)
    return Residuals(out, dout.astype(out.dtype), jnp.where(jnp.isneginf(lse), jnp.inf, lse), delta)
