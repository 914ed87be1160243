"""The contract between a request and a strategy: a spec and local shards in, the attention of this rank's queries out.

A strategy is an object of a class derived from :class:`Strategy`, whose defaults are those of a strategy around a kernel.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import ANY_SCORE, Extras, Kernel, KernelConfig, Problem, Residuals
from jax_core.operands import Operands
from jax_core.strategies.transfers.traffic import Traffic

LAYOUTS_AND_SINKS = frozenset("softmax_aux contiguous zigzag striped".split())
KERNEL_FEATURES = (
    LAYOUTS_AND_SINKS
    | ANY_SCORE
    | frozenset("wide_ids second_derivative fused_backward deterministic float16 bfloat16 float32 float64".split())
)


def extras_of(operands: Operands) -> Extras:
    """What a kernel takes beside the shards, not yet cut to a pair of them."""
    return Extras(*(getattr(operands, name) for name in Extras._fields))


@dataclass(frozen=True)
class RingSpec:
    """Everything static about one attention: equal specs and shapes share one compiled program.

    ``problem``: what was asked for; what a strategy computes may be less, as a shorter window. ``kernel``: what computes a pair of
    shards; None for a strategy with a kernel of its own. ``fwd_config``, ``bwd_config``: how a kernel computes each pass.
    ``lse_gradient``: whether the LSE may have a cotangent; if False, one passed anyway is ignored. ``by_document``: whether the
    kernel takes documents as they are, not as segment ids. ``padding``: whether there may be rows of no document.
    ``differentiable``: whether JAX is to differentiate a pass itself, which is then sent in a form that has derivatives.
    """

    problem: Problem
    strategy: "Strategy"
    kernel: Kernel | None
    fwd_config: KernelConfig[FwdParams]
    bwd_config: KernelConfig[BwdParams]
    axis_name: str | tuple[str, ...] | None = None
    lse_gradient: bool = True
    by_document: bool = False
    padding: bool = True
    differentiable: bool = False


@dataclass(frozen=True)
class Strategy(ABC):
    """How to attend to a sharded sequence; equal objects do the same."""

    # The features (``request.features``) that it or its kernel handles. A request for any other is refused.
    CAPABILITIES: ClassVar[frozenset[str]] = KERNEL_FEATURES
    # Features done by the strategy, so the kernel need not support them.
    DONE_BY_STRATEGY: ClassVar[frozenset[str]] = LAYOUTS_AND_SINKS
    # None for a strategy that runs the chosen kernel, else the platform of the strategy's own kernel.
    FIXED_PLATFORM: ClassVar[str | None] = None
    # Of what has not met its hardware: what was checked, and what was not (``experimental``).
    EXPERIMENTAL: ClassVar[str] = ""
    # Are the queries the same on all ranks?
    SHARED_QUERIES: ClassVar[bool] = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of mesh axes, in order, for which "auto" tries it first."""
        return ()

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        """None, or in words why it cannot do this with these parameters."""
        return None

    def default_params(self, problem: Problem) -> tuple[FwdParams, BwdParams]:
        """What it uses if the caller gives none; its kernel completes them."""
        return FwdParams(), BwdParams()

    def kernel_problem(self, problem: Problem) -> Problem:
        """What it asks of its kernel: the lengths, heads and features of the calls that it makes."""
        return problem

    def sends_halo_only(self, problem: Problem) -> bool:
        """Whether only a halo is sent, because the mask is a short window."""
        return False

    @abstractmethod
    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        """What a pass sends and holds."""

    @abstractmethod
    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        """``(out, lse)``: attention of the local queries over the whole sequence. ``out [batch, q_length, heads, value_dim]`` in
        the query's dtype; ``lse [batch, heads, q_length]``, natural log, float32 (float64 for float64 inputs), ``-inf`` where a row
        saw neither key nor sink (its ``out`` is 0)."""

    @abstractmethod
    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        """The gradients of ``operands``, each in its operand's shape and dtype; None for integer operands. ``out``, ``lse`` are the
        results of ``forward``; ``dout``, ``dlse`` (may be None) their cotangents. The gradient of an operand that ranks share
        (sinks, slopes) is this rank's part of the sum."""


def make_residuals(out: Array, lse: Array, dout: Array, dlse: Array | None) -> Residuals:
    """What kernels need per query row, ``delta [batch, heads, q_length]``, computed once for all steps. ``out``, ``lse``: the
    results of the whole forward, ``-inf`` where a row saw no key; ``dout``, ``dlse`` (or None): their cotangents."""
    delta = jnp.swapaxes((out.astype(lse.dtype) * dout.astype(lse.dtype)).sum(-1), 1, 2)
    delta = delta if dlse is None else delta - dlse.astype(lse.dtype)
    return Residuals(out, dout.astype(out.dtype), jnp.where(jnp.isneginf(lse), jnp.inf, lse), delta)
