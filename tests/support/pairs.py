"""Compares a kernel with the XLA kernel in float64 on one pair of shards: what the ring requires of it, without a ring."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import contract, xla
from jax_core.kernels.contract import Grads, KernelConfig, Pair, Partial, Residuals, Scores
from jax_core.kernels.merge import join
from jax_core.masks.layout import Layout, runs
from jax_core.masks.plan import Plan
from jax_core.masks.static import make_mask
from jax_core.request.hardware import capability
from jax_core.strategies.contract import make_residuals

CAUSAL = make_mask(True)


@dataclass(frozen=True)
class ShardPair:
    """Rank ``rank``'s queries and the keys of rank ``source`` in a ring of ``size``; lengths are per shard."""

    queries: int
    keys: int
    heads: int = 2
    kv_heads: int = 1
    dim: int = 32
    value_dim: int | None = None
    dtype: str = "float32"
    batch: int = 1
    layout: Layout = "contiguous"
    rank: int = 0
    source: int = 0
    size: int = 1
    scores: Scores = field(default_factory=lambda: Scores(CAUSAL, 0.3))
    carry: bool = False
    last: bool = False  # the output is requested in the inputs' dtype
    fused: bool = False
    deterministic: bool = False


SMALL = FwdParams(16, 16), BwdParams(16, 32)
PIECES = Plan(20, ((0, 3, 4), (1, 2, 5)))
PAIRS = {
    "own shard of a zigzag": ShardPair(40, 40, layout="zigzag", rank=1, source=1, size=2, carry=True),
    "pieces of a plan": ShardPair(60, 60, layout=PIECES, rank=1, source=0, size=2, carry=True),
    "own pieces of a plan": ShardPair(60, 60, layout=PIECES, size=2, scores=Scores(make_mask(False, (25, 13)), 0.3), fused=True),
    "a later shard of a zigzag": ShardPair(40, 40, layout="zigzag", rank=0, source=1, size=2, carry=True),
    "a shard that is not seen": ShardPair(40, 33, rank=0, source=1, size=2, carry=True),
    "nothing seen yet": ShardPair(40, 33, rank=0, source=1, size=2),
    "striped": ShardPair(37, 50, layout="striped", rank=1, source=2, size=3, carry=True, fused=True),
    "window of two sides, striped": ShardPair(
        33, 50, layout="striped", rank=1, size=3, scores=Scores(make_mask(False, (25, 13)), 0.3)
    ),
    "chunks, zigzag": ShardPair(50, 50, layout="zigzag", rank=1, source=0, size=2, scores=Scores(make_mask(True, None, 30), 0.3)),
    "dims that are no power of two": ShardPair(20, 20, dim=80, value_dim=24, kv_heads=2),
}  # fmt: skip


def inputs(pair: ShardPair) -> tuple[tuple, Any, Any, Any]:
    """``((q, k, v), dout, carry, dq)``, in float64 with values that the pair's dtype represents exactly."""
    rng = np.random.default_rng(0)
    value_dim = pair.value_dim or pair.dim

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(pair.dtype)).astype(np.float64)

    q = normal(pair.batch, pair.queries, pair.heads, pair.dim)
    k, v = (normal(pair.batch, pair.keys, pair.kv_heads, dim) for dim in (pair.dim, value_dim))
    dout = normal(pair.batch, pair.queries, pair.heads, value_dim)
    before = rng.standard_normal(dout.shape).astype(np.float32).astype(np.float64)
    lse = rng.standard_normal((pair.batch, pair.heads, pair.queries)).astype(np.float32).astype(np.float64)
    dq = rng.standard_normal(q.shape).astype(np.float32).astype(np.float64)
    return (q, k, v), dout, Partial(before, lse), dq


def run(kernel, pair: ShardPair, params: tuple[FwdParams, BwdParams], dtype: str) -> tuple[Partial, Grads]:
    """Forward and backward of the pair by ``kernel`` in ``dtype``; the backward takes the float64 result of the forward."""
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    qkv, dout, carry, dq = inputs(pair)
    diagonal = pair.rank == pair.source

    @jax.jit
    def both(qkv, dout, carry, dq, residuals, ranks):
        places = ranks if pair.size > 1 else (0, 0)  # as in a ring: on the device, unless there is one rank
        q_runs, k_runs = (
            runs(pair.layout, rank, pair.size, length) for rank, length in zip(places, (pair.queries, pair.keys), strict=True)
        )
        shards = Pair(*qkv, q_runs, k_runs, pair.scores, diagonal=diagonal)
        carried = carry if pair.carry and kernel.CONTINUES else None
        of_pass: dict[str, Any] = dict(capability=capability("gpu") or 90, fused=pair.fused, deterministic=pair.deterministic)
        forward, backward = (KernelConfig(each, **of_pass) for each in params)
        result = kernel.forward(shards, carried, qkv[0].dtype if pair.last else wide, forward)
        if not kernel.CONTINUES:
            result = join([carry, result] if pair.carry else [result], wide)
        residuals = residuals or make_residuals(result.out, result.lse, dout, None)
        plain = kernel.finish is contract.finish
        grads = kernel.backward(shards, residuals, dq if pair.carry and plain else None, backward)
        if not plain:
            found = kernel.finish(qkv, (grads.dq, grads.dk, grads.dv), pair.scores)
            grads = Grads(found[0].astype(wide) + (dq if pair.carry else 0), *found[1:], None, None)
        return result, grads, residuals

    with jax.enable_x64(True):
        ranks = jnp.int32(pair.rank), jnp.int32(pair.source)
        exact = both(qkv, dout, carry, dq, None, ranks) if dtype == "float64" else None
        if exact is not None:
            return exact
        residuals = both_in_float64(pair)[2]
    cast = lambda tree, to: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), to), tree)  # noqa: E731
    residuals = Residuals(
        cast(residuals.out, dtype), cast(residuals.dout, dtype), cast(residuals.lse, wide), cast(residuals.delta, wide)
    )
    ranks = jnp.int32(pair.rank), jnp.int32(pair.source)
    return both(cast(qkv, dtype), cast(dout, dtype), cast(carry, wide), cast(dq, wide), residuals, ranks)


def both_in_float64(pair: ShardPair):
    return run(xla, pair, (FwdParams(64, 64), BwdParams(64, 64)), "float64")


def check(kernel, pair: ShardPair, params: tuple[FwdParams, BwdParams]) -> None:
    """Each result within a few roundings of the inputs' dtype, relative to its size; empty residuals exactly empty."""
    (out, lse), gradients, _ = run(kernel, pair, params, pair.dtype)
    exact, wanted, _ = both_in_float64(pair)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact.lse))
    named = {"out": (out, exact.out), "lse": (lse, exact.lse)}
    named |= {name: (getattr(gradients, name), getattr(wanted, name)) for name in ("dq", "dk", "dv")}
    for name, (got, want) in named.items():
        got, want = (np.where(np.isneginf(x), 0, x) for x in (np.asarray(got, np.float64), np.asarray(want)))
        assert np.isfinite(got).all(), name
        size, error = np.sqrt(np.mean(want**2)), np.sqrt(np.mean((got - want) ** 2))
        assert error <= allowed(pair.dtype, name) * size, f"{name}: error {error:.2e} of {size:.2e}"


def allowed(dtype: str, name: str) -> float:
    """As a root mean square. Weights and their gradients are each rounded once to the inputs' dtype before the matrix products."""
    if dtype == "float32" or name == "lse":
        return 4e-6
    return float(jnp.finfo(dtype).eps)
