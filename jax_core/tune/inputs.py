"""Arrays of a problem's shapes, made by the search itself: it may be started in the middle of a trace, where there are none."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.kernels.contract import Extras, Pair, Problem, Scores
from jax_core.masks.layout import Run

DOCUMENTS = 8  # in a shard with segment ids
_VISIBLE = 0.9  # of a boolean mask


class Inputs(NamedTuple):
    q: Array
    k: Array
    v: Array
    dout: Array
    extras: Extras

    def pair(self, scores: Scores) -> Pair:
        """One shard with its own keys, as on one device and as in the first step of a ring."""
        q_run, k_run = (Run(0, 1, x.shape[1]) for x in (self.q, self.k))
        return Pair(self.q, self.k, self.v, (q_run,), (k_run,), scores, self.extras, diagonal=True)

    def astype(self, dtype: DTypeLike) -> "Inputs":
        """Its floating arrays, but the slopes, which are never narrow."""
        bias = None if self.extras.bias is None else self.extras.bias.astype(dtype)
        q, k, v, dout = (x.astype(dtype) for x in (self.q, self.k, self.v, self.dout))
        return Inputs(q, k, v, dout, self.extras._replace(bias=bias))


def make_inputs(problem: Problem) -> Inputs:
    """Standard normal shards: zeros would be computed faster. NotImplementedError for what only the caller could make."""
    if problem.scores.predicates:
        raise NotImplementedError("a search makes its own arrays, and cannot make those of a mask function")
    q_shape = problem.batch, problem.q_length, problem.heads, problem.dim
    k_shape = problem.batch, problem.k_length, problem.kv_heads, problem.dim
    shapes = (q_shape, k_shape, (*k_shape[:3], problem.value_dim), (*q_shape[:3], problem.value_dim))
    q, k, v, dout = (_normal(number, shape, problem.dtype) for number, shape in enumerate(shapes))
    return Inputs(q, k, v, dout, _extras(problem))


def _normal(number: int, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.random.normal(jax.random.key(number), shape, dtype)


def _extras(problem: Problem) -> Extras:
    asked, plane = problem.features, (1, 1, problem.q_length, problem.k_length)
    q_segments, kv_segments = (_documents(problem.batch, length) for length in (problem.q_length, problem.k_length))
    q_positions, kv_positions = (_positions(problem.batch, length) for length in (problem.q_length, problem.k_length))
    return Extras(
        bias=_normal(4, plane, problem.dtype) if "bias" in asked else None,
        mask=jax.random.bernoulli(jax.random.key(5), _VISIBLE, plane) if "mask" in asked else None,
        q_segment_ids=q_segments if "q_segment_ids" in asked else None,
        kv_segment_ids=kv_segments if "kv_segment_ids" in asked else None,
        q_position_ids=q_positions if "q_position_ids" in asked else None,
        kv_position_ids=kv_positions if "kv_position_ids" in asked else None,
        alibi_slopes=_slopes(problem.heads) if "alibi_slopes" in asked else None,
        dropout_seed=jnp.array([1, 2], jnp.uint32) if "dropout_seed" in asked else None,
        origin=jnp.zeros(2, jnp.int32) if "origin" in asked else None,
    )


def _positions(batch: int, length: int) -> Array:
    return jnp.tile(jnp.arange(length, dtype=jnp.int32), (batch, 1))


def _documents(batch: int, length: int) -> Array:
    return _positions(batch, length) * DOCUMENTS // max(1, length)


def _slopes(heads: int) -> Array:
    return 2.0 ** (-8 * jnp.arange(1, heads + 1, dtype=jnp.float32)[None] / heads)
