"""The contract between the ring and a kernel: one pair of shards in, a partial result or gradients out.

A kernel is a module with

- ``unsupported(scores, config) -> str | None``: None, or in words why it cannot compute this;
- ``default_params() -> (FwdParams, BwdParams)``: what it uses where the caller gives none;
- ``forward(q, k, v, q_runs, k_runs, *, scores, extras, carry, config) -> Partial``: attention of the query shard over the key
  shard, continuing the online softmax from ``carry``, the partial so far (at first: ``out`` 0, ``lse`` -inf);
- ``FUSED_BACKWARD``: whether its backward makes dQ, dK and dV in one sweep over the scores;
- ``backward(q, k, v, dout, lse, delta, q_runs, k_runs, *, scores, extras, config) -> Grads``: the pair's share of the gradients,
  given the rows' final ``lse`` and ``delta``.

Shapes: ``q [batch, q_length, heads, dim]``, ``k [batch, k_length, kv_heads, dim]``, ``v [batch, k_length, kv_heads, value_dim]``,
``out``/``dout [batch, q_length, heads, value_dim]``, ``lse``/``delta [batch, heads, q_length]``. Partial results and gradients are
in the accumulation dtype: float32, or float64 for float64 inputs. ``lse`` is a natural logarithm, ``-inf`` where a row saw no key
(its ``out`` is 0). ``delta = rowsum(out * dout) - dlse`` (Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B.2; the
second term makes the LSE output differentiable).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_core.mask import Mask
from jax_core.predicate import Predicate


@dataclass(frozen=True)
class Scores:
    """What one attention weight is, as far as it is known before any array is: ``x = scale * q . k``; with a soft cap
    ``x = softcap * tanh(x / softcap)``; then bias and ALiBi are added; then masks; then dropout with ``dropout_prob``."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_prob: float = 0.0
    predicates: tuple[Predicate, ...] = ()
    precision: Any = None  # of the matrix products: a jax.lax.Precision name, None for the kernel's own choice
    logits_dtype: str | None = None  # round q . k to this dtype before the softmax; None keeps the accumulation dtype


class Extras(NamedTuple):
    """The arrays that ride beside the static mask, cut to one pair of shards. Each may be None.

    ``bias`` float, ``mask`` bool: ``[batch|1, heads|1, q_length|1, k_length]``; ids int32 ``[batch|1, length]``; ``alibi_slopes``
    ``[batch|1, heads]``; ``dropout_seed`` uint32 ``[2]``; ``origin`` int32 ``[2]``, the global numbers of the first batch entry and
    the first head held here; ``predicate_arrays``: a tuple of arrays for each predicate.
    """

    bias: Any = None
    mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_position_ids: Any = None
    kv_position_ids: Any = None
    alibi_slopes: Any = None
    dropout_seed: Any = None
    origin: Any = None
    predicate_arrays: tuple[tuple[Any, ...], ...] = ()


class Partial(NamedTuple):
    """Attention over the keys seen so far: ``out`` normalised by them alone, ``lse`` the logarithm of their weights' sum."""

    out: jax.Array
    lse: jax.Array


class Grads(NamedTuple):
    """A pair's share of the gradients; ``dbias``, ``dalibi_slopes`` have their operand's shape, or are None without one."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None
    dalibi_slopes: jax.Array | None


def accumulation_dtype(dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
