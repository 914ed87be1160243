"""Problems, tables and a small kernel for the tests of jax_core.tune."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, Pair, Partial, Problem, Scores, finish
from jax_core.masks.static import Mask
from jax_core.tune.table import Tuned

NO_MASK = Mask()
FORWARD, BACKWARD = FwdParams(32, 16), BwdParams(16, 32)


def problem(asked: str = "", mask: Mask = NO_MASK, **changed: Any) -> Problem:
    sizes = dict(batch=1, q_length=64, k_length=64, heads=4, kv_heads=2, dim=8, value_dim=8)
    features = frozenset({"contiguous", "float32", *asked.split()})
    return Problem(**(dict(scores=Scores(mask, 0.3), dtype="float32", features=features) | sizes | changed))


def found(params: FwdParams = FORWARD, ms: float = 1.0, **changed: Any) -> Tuned:
    settings = dict(heuristic_ms=2.0, complete=True, day="2026-11-22", versions={"jax": "0.10.2"})
    return Tuned(**(dict(params=params, ms=ms) | settings | changed))


def _logits(pair: Pair):
    """Of a plain attention, causal or not, with a bias or not."""
    (q, k, _), scores, extras = pair.shards, pair.scores, pair.extras
    x = scores.scale * jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))
    x = x if extras.bias is None else x + extras.bias
    return jnp.where(jnp.tri(q.shape[1], dtype=bool), x, -jnp.inf) if scores.mask.causal else x


def dense_forward(pair: Pair, carry, out_dtype, config) -> Partial:
    x = _logits(pair)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x), jnp.repeat(pair.v, pair.q.shape[2] // pair.v.shape[2], 2))
    return Partial(out.astype(out_dtype), jax.nn.logsumexp(x, -1))


def dense_backward(pair: Pair, residuals, dq, config) -> Grads:
    (q, k, v), scores, extras = pair.shards, pair.scores, pair.extras
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(_logits(pair) - residuals.lse[..., None])
    dweights = jnp.einsum("bqhd,bkhd->bhqk", residuals.dout, jnp.repeat(v, group, 2))
    dx = weights * (dweights - residuals.delta[..., None])
    dk, dv = jnp.einsum("bhqk,bqhd->bkhd", dx, q) * scores.scale, jnp.einsum("bhqk,bqhd->bkhd", weights, residuals.dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    dq = jnp.einsum("bhqk,bkhd->bqhd", dx, jnp.repeat(k, group, 2)) * scores.scale
    return Grads(dq, dk, dv, None if extras.bias is None else dx.sum((0, 1), keepdims=True), None)


LISTED = ((16, 16), (32, 16), (64, 64))


def kernel(**changed: Any) -> SimpleNamespace:
    """Plain attention, whose blocks change nothing but what ``changed`` makes of them; its own choice is 64 x 32."""
    configs = tuple(FwdParams(*sides) for sides in LISTED), tuple(BwdParams(*sides) for sides in LISTED)
    defaults = FwdParams(64, 32), BwdParams(64, 32)
    own = dict(
        CONTINUES=True,
        finish=finish,
        forward=dense_forward,
        backward=dense_backward,
        unsupported=lambda *_: None,
        CAPABILITIES=frozenset(),
    )
    return SimpleNamespace(**(own | dict(default_params=lambda _: defaults, configs=lambda _: configs) | changed))
