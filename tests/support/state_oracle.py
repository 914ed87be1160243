"""Layers with a state, token by token over the whole sequence: the oracle, which shares no code with what it checks."""

import jax
import jax.numpy as jnp
from jax import lax


def attention(operands, state, ids, *, scale=None, l2norm=False):
    """Of ``q, k, v`` and perhaps ``g`` and ``beta``: linear attention and the delta rules."""
    q, k, v = (operands[name] for name in "qkv")
    if l2norm:
        q, k = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    g = operands.get("g", jnp.zeros(v.shape[2]))
    g = g if g.ndim in (2, 4) else g[..., None]
    g = jnp.broadcast_to(g, (*v.shape[:3], g.shape[-1]))

    def step(state, token):
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None] * state
        u = v if beta is None else beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + jnp.einsum("bhk,bhv->bhkv", k, u)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    state = jnp.zeros((*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])) if state is None else state
    return along(step, state, (q, k, v, g, operands.get("beta")), ids)


def ssd(operands, state, ids):
    x, dt, a, b, c = (operands[name] for name in ("x", "dt", "A", "B", "C"))
    d = operands.get("D", jnp.zeros(x.shape[2]))
    d = d if d.ndim == 2 else d[:, None]
    b, c = (jnp.repeat(y, x.shape[2] // b.shape[2], axis=2) for y in (b, c))

    def step(state, token):
        x, dt, b, c = token
        state = jnp.exp(dt * a)[..., None, None] * state + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, b)
        return state, jnp.einsum("bhpn,bhn->bhp", state, c) + d * x

    state = jnp.zeros((*x.shape[:1], *x.shape[2:], b.shape[-1])) if state is None else state
    return along(step, state, (x, dt, b, c), ids)


def along(step, state, tokens, ids):
    """The steps one after another. A token of another document than the last one before it meets a state of 0; on padding nothing
    happens, and the output is 0."""
    ids = jnp.zeros(tokens[0].shape[:2], int) if ids is None else ids

    def guarded(carry, each):
        state, document = carry
        here, token = each
        shaped = lambda x, like: x.reshape(-1, *(1,) * (like.ndim - 1))  # noqa: E731
        token = jax.tree.map(lambda x: jnp.where(shaped(here >= 0, x), x, 0), token)
        entering = jnp.where(shaped((here >= 0) & (document >= 0) & (here != document), state), 0, state)
        new, y = step(entering, token)
        new = jnp.where(shaped(here >= 0, new), new, state)
        return (new, jnp.where(here >= 0, here, document)), jnp.where(shaped(here >= 0, y), y, 0)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (ids, tokens))
    (state, _), y = lax.scan(guarded, (state, jnp.full(ids.shape[0], -1)), by_time)
    return jnp.moveaxis(y, 0, 1), state


def convolution(operands, state, ids, *, activation=None):
    """Its state is the last inputs."""
    x, weight, bias = operands["x"], operands["weight"], operands.get("bias", 0)

    def step(state, token):
        window = jnp.concatenate([state, token[0][:, None]], 1)
        y = jnp.einsum("bwc,cw->bc", window, weight) + bias
        return window[:, 1:], y * jax.nn.sigmoid(y) if activation == "silu" else y

    state = jnp.zeros((x.shape[0], weight.shape[1] - 1, x.shape[2])) if state is None else state
    return along(step, state, (x,), ids)
