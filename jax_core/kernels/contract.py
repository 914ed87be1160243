"""The contract between the ring and a kernel: one pair of shards in, a partial result or gradients out.

A kernel is a module with

- ``CAPABILITIES``: the features (``request.features``) that it handles, including its dtypes. A request for any other is refused.
  "second_derivative", which is asked for after the call, is handled by passes that JAX can differentiate in forward mode;
- ``unsupported(problem, forward, backward) -> str | None``: None, or in words why it cannot compute this with these parameters;
- ``default_params(problem) -> (FwdParams, BwdParams)``: what it uses if the caller gives none;
- ``forward(pair, carry, out_dtype, config) -> Partial``: attention of the pair's queries over its keys, continuing the online
  softmax from ``carry``, the partial result so far (None at the first pair); ``out`` in ``out_dtype``. ``config``: how, as a
  :class:`KernelConfig`; a kernel asks no device;
- ``CONTINUES``: whether it does so. If not, ``carry`` is None, ``out`` is in the query's dtype, and the ring joins the partials
  (``merge.join``), several in one pass over memory. Then rows with LSE -inf may hold anything, but 0 where there is one pair;
- ``backward(pair, residuals, dq, config) -> Grads``: the pair's share of the gradients, given the query rows' final statistics.
  ``dq`` is the query gradient so far (or None), and is included in the result's ``dq``;
- ``finish((q, k, v), (dq, dk, dv), scores) -> (dq, dk, dv)``: the sums over all pairs as gradients in their operands' dtype. Until
  then they may be in a form of the kernel's own: trees of arrays, which the ring adds and sends. If it continues, they are arrays
  like the operands.

Shapes: those of :class:`Pair`; ``out``/``dout [batch, q_length, heads, value_dim]``, ``lse``/``delta [batch, heads, q_length]``.
Partial results and gradients are in the accumulation dtype: float32, or float64 for float64 inputs; only the ``out`` of the last
pair may be requested in the query's dtype. ``lse`` is a natural logarithm, ``-inf`` where a row saw no key (its ``out`` is 0).
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.masks.functions import Predicate
from jax_core.masks.layout import Layout, Run
from jax_core.masks.static import Mask
from jax_core.operands import EIGHTHS
from jax_core.varying import varying_axes

# The positions of a shard: one or more runs of equal length and stride. One or two are those of a named layout or a whole sequence;
# a kernel that lists the feature "plan" takes more, which may lie anywhere, in ascending order.
Runs = tuple[Run, ...]
Precision = lax.Precision | str | None
Params = TypeVar("Params", bound=FwdParams)
Sum = TypeVar("Sum")  # a gradient on its way: an array like its operand, or a form of the kernel's own, a tree of arrays
# The features that are in the capabilities of each kernel whose scores are computed here, not by another library.
ANY_SCORE = frozenset(
    "causal left right chunk any_position softcap dropout_prob predicates precision logits_dtype bias mask q_segment_ids "
    "kv_segment_ids q_position_ids kv_position_ids alibi_slopes dropout_seed origin plan lse_gradient".split()
)


@dataclass(frozen=True)
class Scores:
    """How an attention weight is computed, as far as that is static: ``x = scale * q . k``; with a soft cap
    ``x = softcap * tanh(x / softcap)``; then bias and ALiBi are added; then masks; then dropout with ``dropout_prob``."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_prob: float = 0.0
    predicates: tuple[Predicate, ...] = ()
    precision: Precision = None  # of the matrix products: a jax.lax.Precision name, None for the kernel's own choice
    logits_dtype: str | None = None  # round q . k to this dtype before the softmax; None keeps the accumulation dtype

    @property
    def precision_name(self) -> str | None:
        """In lower case, whichever of JAX's forms was used."""
        return None if self.precision is None else str(getattr(self.precision, "name", self.precision)).lower()


@dataclass(frozen=True)
class Problem:
    """What decides whether a kernel can compute an attention, and how: all of it static.

    Lengths are those of a shard; ``sizes``: of each axis of a ring of ``size`` ranks. ``features``: what is asked for beyond plain
    attention (``request.features``). ``backend``: the devices that the arrays are on, "cpu", "gpu" or "tpu".
    ``capability``: the generation of the GPU, as 90 for 9.0; 0 if there is none here, or not one of NVIDIA's. ``generation``: that
    of the TPU, as JAX names it; "" if it is not known. ``documents``: how many a sequence, or if they are ``placed`` a shard, may
    have, where the segment ids are those of documents; 0 where nothing is known of them. ``shared_eighths``: the first
    eighths of a shard, which hold all that other ranks see; all of them but with placed documents.
    """

    scores: Scores
    dtype: str
    batch: int
    q_length: int
    k_length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    layout: Layout = "contiguous"
    size: int = 1
    sizes: tuple[int, ...] = ()
    features: frozenset[str] = frozenset()
    backend: str = "cpu"
    capability: int = 0
    generation: str = ""
    documents: int = 0
    placed: bool = False
    shared_eighths: int = EIGHTHS


@dataclass(frozen=True)
class KernelConfig(Generic[Params]):
    """How a kernel computes a pass: its parameters, complete; ``capability`` and ``generation`` of the hardware as in
    :class:`Problem`; and of a backward, ``fused``: dQ, dK and dV in one sweep over the scores, ``deterministic``: the same bits in
    every run. A kernel that does neither refuses the features of these names."""

    params: Params
    capability: int = 0
    generation: str = ""
    fused: bool = False
    deterministic: bool = False


def config_of(problem: Problem, params: Params) -> KernelConfig[Params]:
    fused, deterministic = (name in problem.features for name in ("fused_backward", "deterministic"))
    return KernelConfig(params, problem.capability, problem.generation, fused, deterministic)


class Extras(NamedTuple):
    """The arrays that accompany the static mask, cut to one pair of shards. Each may be None.

    ``bias`` float, ``mask`` bool: ``[batch|1, heads|1, q_length|1, k_length]``; ids int32 ``[batch|1, length]``; ``alibi_slopes``
    ``[batch|1, heads]``; ``dropout_seed`` uint32 ``[2]``; ``origin`` int32 ``[2]``, the global indices of the first batch entry and
    the first head held here; ``documents`` as in ``operands.Operands``, only for a kernel that takes them; ``predicate_arrays``:
    a tuple of arrays for each predicate.
    """

    bias: Array | None = None
    mask: Array | None = None
    q_segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    q_position_ids: Array | None = None
    kv_position_ids: Array | None = None
    alibi_slopes: Array | None = None
    dropout_seed: Array | None = None
    origin: Array | None = None
    documents: Array | None = None
    predicate_arrays: tuple[tuple[Array | np.ndarray, ...], ...] = ()


@dataclass(frozen=True)
class Pair:
    """A shard of queries and a shard of keys, and how their scores are computed.

    ``q [batch, q_length, heads, dim]``, ``k [batch, k_length, kv_heads, dim]``, ``v [batch, k_length, kv_heads, value_dim]``;
    ``q_runs``, ``k_runs``: their places in the sequence. ``diagonal``: it is known statically that the queries' own positions are
    among those of the keys: both shards are of one rank, as at the first pair of a ring, or the keys are more than that (the whole
    sequence, or all that a window shows). ``padding``: whether there may be rows of no document. ``alone``: it is known
    statically that nothing is joined with the result: no ring, or one whose ranks see no keys of each other.
    """

    q: Array
    k: Array
    v: Array
    q_runs: Runs
    k_runs: Runs
    scores: Scores
    extras: Extras = Extras()
    diagonal: bool = False
    padding: bool = True
    alone: bool = False

    @property
    def shards(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v

    @property
    def predicates(self) -> list[tuple[Predicate, tuple[Array | np.ndarray, ...]]]:
        """The mask functions, each with its arrays."""
        return list(zip(self.scores.predicates, self.extras.predicate_arrays, strict=True))

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that anything here varies over."""
        return varying_axes(self.shards, self.extras, [run.start for run in (*self.q_runs, *self.k_runs)])


class Partial(NamedTuple):
    """Attention over the keys seen so far: ``out`` is normalised over them, ``lse`` is the log-sum-exp of their logits."""

    out: Array
    lse: Array


class Residuals(NamedTuple):
    """What the backward needs per query row, computed once per pass: the final ``out`` and its cotangent, both in the query's
    dtype; the final ``lse``, but ``+inf`` where a row saw no key, so that ``exp(x - lse)`` is 0 there; and
    ``delta = rowsum(out * dout) - dlse`` (Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B.2; the second term makes
    the LSE output differentiable)."""

    out: Array
    dout: Array
    lse: Array
    delta: Array


class Grads(NamedTuple, Generic[Sum]):
    """A pair's share of the gradients; ``dq`` includes the pairs before. ``dbias``, ``dalibi_slopes`` have their operand's shape,
    or are None without one."""

    dq: Sum  # [batch, q_length, heads, dim], or a form of the kernel's own, which its ``finish`` takes
    dk: Sum
    dv: Sum
    dbias: Array | None
    dalibi_slopes: Array | None


class Kernel(Protocol[Sum]):
    """What a kernel's module provides."""

    CAPABILITIES: frozenset[str]
    CONTINUES: bool

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None: ...

    def takes_documents(self, problem: Problem) -> bool: ...

    def default_params(self, problem: Problem) -> tuple[FwdParams, BwdParams]: ...

    def forward(self, pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial: ...

    def backward(self, pair: Pair, residuals: Residuals, dq: Sum | None, config: KernelConfig[BwdParams]) -> Grads[Sum]: ...

    def finish(
        self, operands: tuple[Array, Array, Array], grads: tuple[Sum, Sum, Sum], scores: Scores
    ) -> tuple[Array, Array, Array]: ...


def chosen_by_itself(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """The parameters of kernels that leave none to others."""
    del problem
    return FwdParams(), BwdParams()


def takes_documents(problem: Problem) -> bool:
    """Of kernels that go by segment ids: never."""
    del problem
    return False


def finish(operands: tuple[Array, Array, Array], grads: tuple[Array, Array, Array], scores: Scores) -> tuple[Array, Array, Array]:
    """For kernels whose gradients are plain arrays."""
    del scores
    dq, dk, dv = (grad.astype(operand.dtype) for grad, operand in zip(grads, operands, strict=True))
    return dq, dk, dv


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def no_gpu(backend: str, capability: int) -> str | None:
    """The end of a sentence that a kernel needs an NVIDIA GPU; None if there is one."""
    if backend != "gpu":
        return f'this program runs on "{backend}"'
    return None if capability else "this process has none"
