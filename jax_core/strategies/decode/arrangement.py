"""How a few queries and many keys are handed to a kernel, so that keys are read once and a GPU is filled.

The query heads that share a K/V head become further query rows: a tile of keys then serves all of them. On a GPU the keys are cut
into parts, each a further batch entry with the same queries, whose partial results are joined afterwards ("flash decoding", Dao et
al. 2023): one query row alone would occupy as many of a GPU's processors as there are K/V heads.

Names of dimensions in comments: b batch, p parts, t queries, h query heads, n K/V heads, g query heads of a group, d dim.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec

_PROGRAMS = 256  # that a kernel should launch: about two for each multiprocessor of an H100 or H200
_SHORTEST_PART = 256  # keys; shorter ones would take longer to join than to read


@dataclass(frozen=True)
class Arrangement:
    batch: int
    group: int
    parts: int

    def rows(self, x: Array) -> Array:
        """``[b, t, n*g, d] -> [b*p, t*g, n, d]``"""
        b, t, heads, d = x.shape
        x = x.reshape(b, t, heads // self.group, self.group, d).swapaxes(2, 3)
        return jnp.repeat(x.reshape(b, t * self.group, -1, d), self.parts, axis=0)

    def statistics(self, x: Array) -> Array:
        """``[b, n*g, t] -> [b*p, n, t*g]``"""
        b, heads, t = x.shape
        x = x.reshape(b, heads // self.group, self.group, t).swapaxes(2, 3)
        return jnp.repeat(x.reshape(b, -1, t * self.group), self.parts, axis=0)

    def row_ids(self, ids: Array | None) -> Array | None:
        """``[b|1, t] -> [b*p|1, t*g]``"""
        return None if ids is None else self.of_entries(jnp.repeat(ids, self.group, axis=1))

    def of_entries(self, x: Array | None) -> Array | None:
        """``[b|1, ...] -> [b*p|1, ...]``"""
        return x if x is None or x.shape[0] == 1 else jnp.repeat(x, self.parts, axis=0)

    def keys(self, x: Array) -> Array:
        """``[b, length, ...] -> [b*p, length/p, ...]``"""
        return x.reshape(x.shape[0] * self.parts, x.shape[1] // self.parts, *x.shape[2:])

    def key_ids(self, ids: Array | None) -> Array | None:
        """``[b|1, length] -> [b*p|1, length/p]``"""
        if ids is None or self.parts == 1:
            return ids
        return self.keys(jnp.broadcast_to(ids, (self.batch, ids.shape[1])))

    def shard(self, x: Array) -> Array:
        """``[b*p, length/p, ...] -> [b, length, ...]``"""
        return x.reshape(self.batch, -1, *x.shape[2:])

    def stacked(self, x: Array) -> Array:
        """``[b*p, ...] -> [p, b, ...]``"""
        return x.reshape(self.batch, self.parts, *x.shape[1:]).swapaxes(0, 1)

    def out(self, x: Array) -> Array:
        """``[b, t*g, n, d] -> [b, t, n*g, d]``"""
        b, rows, n, d = x.shape
        return x.reshape(b, rows // self.group, self.group, n, d).swapaxes(2, 3).reshape(b, rows // self.group, -1, d)

    def lse(self, x: Array) -> Array:
        """``[b, n, t*g] -> [b, n*g, t]``"""
        b, n, rows = x.shape
        return x.reshape(b, n, rows // self.group, self.group).swapaxes(2, 3).reshape(b, n * self.group, -1)

    def slopes_gradient(self, gradient: Array | None, slopes: Array | None) -> Array | None:
        """The sum over the parts, unless the kernel has summed over all entries."""
        if gradient is None or slopes is None or slopes.shape[0] == 1:
            return gradient
        return self.stacked(gradient).sum(0)


def arrangement(spec: RingSpec, operands: Operands) -> Arrangement:
    """Slopes and mask functions tell heads apart, so heads then stay heads; mask functions tell batch entries apart too."""
    (batch, length, kv_heads), functions = operands.key.shape[:3], bool(spec.problem.scores.predicates)
    heads_alike = operands.alibi_slopes is None and not functions
    group = operands.query.shape[2] // kv_heads if heads_alike else 1
    parts = 1 if functions else _parts(spec.problem.backend, batch * kv_heads, length)
    return Arrangement(batch, group, parts)


def _parts(backend: str, programs: int, length: int) -> int:
    """A power of two."""
    parts, most = 1, _PROGRAMS // programs if backend == "gpu" else 1
    while 2 * parts <= min(most, length // _SHORTEST_PART) and length % (2 * parts) == 0:
        parts *= 2
    return parts
