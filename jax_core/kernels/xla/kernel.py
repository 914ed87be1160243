"""Forward and backward of the kernel in plain XLA, after FlashAttention (Dao et al. 2022, arXiv:2205.14135).

Both shards are cut into blocks; scores exist one ``[batch, heads, q_block, k_block]`` block at a time, and a block without visible
pairs is skipped. The backward recomputes the scores and makes dQ, dK and dV in one sweep.

Names of dimensions in comments: n/m query and key blocks, b batch, h key/value heads, g query heads of a group, q and k positions
in a block, d dim.
"""

from functools import partial
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import ANY_SCORE, Grads, KernelConfig, Pair, Partial, Problem, Residuals, Scores, accumulation_dtype
from jax_core.kernels.xla.blocks import (
    Keys,
    Queries,
    Tiles,
    Uncut,
    cut,
    join_heads,
    join_keys,
    join_rows,
    join_tiles,
    split_heads,
    split_rows,
)
from jax_core.kernels.xla.scores import distance, dropout_factor, logits, product, sum_to
from jax_core.varying import vary, varying_axes

CONTINUES = True
CAPABILITIES = ANY_SCORE | frozenset(
    "keys apart wide_ids second_derivative fused_backward deterministic float16 bfloat16 float32 float64".split()
)


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    del problem  # it supports every mask and score, and its backward is always one sweep
    if any(number is not None for params in (forward, backward) for number in (params.num_stages, params.num_warps)):
        return "the xla kernel has no stages or warps; leave num_stages and num_warps None"
    return None


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """Blocks that fit a CPU's cache (benchmarks/NOTES.md)."""
    del problem
    return FwdParams(512, 256), BwdParams(512, 256)


def configs(problem: Problem) -> tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]:
    """Those of which a block is no longer than the shard, but for the smallest."""
    sides = [(q, k) for q in (128, 256, 512, 1024) for k in (128, 256, 512)]
    fitting = [(q, k) for q, k in sides if q <= max(128, problem.q_length) and k <= max(128, problem.k_length)]
    return tuple(FwdParams(*side) for side in fitting), tuple(BwdParams(*side) for side in fitting)


class _State(NamedTuple):
    """The online softmax of a query block: numerator, running maximum, denominator."""

    numerator: Array  # [b, h, g, q, d]
    maximum: Array  # [b, h, g, q]
    denominator: Array


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    queries, keys, tiles, uncut = cut(pair, config.params)
    carry = vary(_nothing_seen(pair.q, pair.v), varying_axes(queries, keys)) if carry is None else carry
    start = _start(carry, queries.q.shape[2], queries.q.shape[4])

    def query_block(_: None, block: tuple[Queries, Tiles, _State]) -> tuple[None, tuple[Array, Array]]:
        query, row, state = block
        state, _ = lax.scan(partial(_update_unless_empty, pair.scores, uncut, query), state, (keys, row))
        return None, _finish(state)

    _, (out, lse) = lax.scan(query_block, None, (queries, tiles, start))
    length = pair.q.shape[1]
    return Partial(join_rows(out, length).astype(out_dtype), join_heads(lse, length))


def _nothing_seen(q: Array, v: Array) -> Partial:
    batch, length, heads, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    out = jnp.zeros((batch, length, heads, v.shape[-1]), dtype)
    return Partial(out, jnp.full((batch, heads, length), -jnp.inf, dtype))


def _update_unless_empty(
    scores: Scores, uncut: Uncut, query: Queries, state: _State, block: tuple[Keys, Tiles]
) -> tuple[_State, None]:
    key, tile = block
    update = partial(_update, scores, uncut, query, key, tile)
    return lax.cond(tile.needed, update, lambda state: state, state), None


def _update(scores: Scores, uncut: Uncut, query: Queries, key: Keys, tile: Tiles, state: _State) -> _State:
    x, _ = logits(scores, uncut, query, key, tile)
    # Any number would do as well, so it has no derivative: that of a maximum looks for the element that equals it, and finds none
    # where XLA computes the logits once more and rounds them differently.
    maximum = lax.stop_gradient(jnp.maximum(state.maximum, x.max(-1)))
    finite = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(x - finite[..., None])
    decay = jnp.exp(state.maximum - finite)
    denominator = state.denominator * decay + weights.sum(-1)
    dropped = weights * dropout_factor(scores, uncut, query, key, weights.dtype)
    numerator = state.numerator * decay[..., None] + product("bhgqk,bhkd->bhgqd", dropped, key.v, scores)
    return _State(numerator, maximum, denominator)


def _start(carry: Partial, kv_heads: int, size: int) -> _State:
    """The state of every query block: a partial is normalised, so its maximum is ``lse`` and its denominator 1 (0 without keys)."""
    lse = split_heads(carry.lse, kv_heads, size, -jnp.inf)
    return _State(split_rows(carry.out, kv_heads, size), lse, jnp.where(jnp.isneginf(lse), 0, jnp.ones_like(lse)))


def _finish(state: _State) -> tuple[Array, Array]:
    some = state.denominator > 0
    denominator = jnp.where(some, state.denominator, 1)
    maximum = jnp.where(some, state.maximum, 0)
    return state.numerator / denominator[..., None], jnp.where(some, maximum + jnp.log(denominator), -jnp.inf)


class _BlockResiduals(NamedTuple):
    """What this backward needs for each query row, in blocks."""

    dout: Array  # [n, b, h, g, q, d]
    lse: Array  # [n, b, h, g, q]
    delta: Array


class _Shares(NamedTuple):
    """The share of one pair of blocks in the gradients."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dalibi_slopes: Array | None


_OfQueries = tuple[Array, Array | None]  # dq of all blocks, and dalibi_slopes
_OfKeys = tuple[Array, Array, Array | None]  # of one block: dk, dv, dbias
_Totals = tuple[Array, Array, Array, Array | None]  # dq, dk, dv, dalibi_slopes


def backward(pair: Pair, residuals: Residuals, dq: Array | None, config: KernelConfig[BwdParams]) -> Grads[Array]:
    """One sweep, and deterministic, in any case."""
    queries, keys, tiles, uncut = cut(pair, config.params)
    kv_heads, size = queries.q.shape[2], queries.q.shape[-2]
    in_blocks = partial(split_heads, kv_heads=kv_heads, size=size)
    # A row that pads a block has an infinite LSE, like one that saw no key: exp(x - inf) is 0.
    lse, delta = in_blocks(residuals.lse, fill=jnp.inf), in_blocks(residuals.delta, fill=0)
    block_rows = _BlockResiduals(split_rows(residuals.dout, kv_heads, size), lse, delta)
    columns = jax.tree.map(lambda tile: jnp.swapaxes(tile, 0, 1), tiles)
    dtype = accumulation_dtype(pair.q.dtype)
    zero = partial(_zero_shares, queries, keys, tiles, uncut, dtype)

    def key_block(totals: _OfQueries, block: tuple[Keys, Tiles]) -> tuple[_OfQueries, _OfKeys]:
        key, column = block

        def query_block(totals: _Totals, block: tuple[Array, Queries, _BlockResiduals, Tiles]) -> tuple[_Totals, Array | None]:
            number, query, row, tile = block
            share = partial(_shares, pair.scores, uncut, query, row, key, tile)
            share = lax.cond(tile.needed, lambda _: share(), lambda _: zero(), None)
            dq, dk, dv, dslopes = totals
            totals = dq.at[number].add(share.dq), dk + share.dk, dv + share.dv, _add(dslopes, share.dalibi_slopes)
            return totals, share.dbias

        dq, dslopes = totals
        nothing = zero()
        numbers = jnp.arange(queries.q.shape[0])
        (dq, dk, dv, dslopes), dbias = lax.scan(
            query_block, (dq, nothing.dk, nothing.dv, dslopes), (numbers, queries, block_rows, column)
        )
        return (dq, dslopes), (dk, dv, dbias)

    dq = jnp.zeros(queries.q.shape, dtype) if dq is None else split_rows(dq, kv_heads, size)
    dq = vary(dq, varying_axes(queries, keys))
    (dq, dslopes), (dk, dv, dbias) = lax.scan(key_block, (dq, zero().dalibi_slopes), (keys, columns))
    extras, q_length, k_length = pair.extras, pair.q.shape[1], pair.k.shape[1]
    return Grads(
        join_rows(dq, q_length),
        join_keys(dk, k_length),
        join_keys(dv, k_length),
        None if dbias is None or extras.bias is None else join_tiles(dbias, extras.bias.shape),
        None if dslopes is None or extras.alibi_slopes is None else dslopes.reshape(extras.alibi_slopes.shape),
    )


def _zero_shares(queries: Queries, keys: Keys, tiles: Tiles, uncut: Uncut, dtype: jnp.dtype) -> _Shares:
    @overload
    def zeros(array: Array, leading: int) -> Array: ...
    @overload
    def zeros(array: Array | None, leading: int) -> Array | None: ...
    def zeros(array: Array | None, leading: int) -> Array | None:
        return None if array is None else jnp.zeros(array.shape[leading:], dtype)

    shares = _Shares(zeros(queries.q, 1), zeros(keys.k, 1), zeros(keys.v, 1), zeros(tiles.bias, 2), zeros(uncut.slopes, 0))
    return vary(shares, varying_axes(queries, keys))


def _add(total: Array | None, share: Array | None) -> Array | None:
    return None if total is None or share is None else total + share


def _shares(scores: Scores, uncut: Uncut, query: Queries, row: _BlockResiduals, key: Keys, tile: Tiles) -> _Shares:
    x, tanh = logits(scores, uncut, query, key, tile)
    weights = jnp.exp(x - row.lse[..., None])
    factor = dropout_factor(scores, uncut, query, key, weights.dtype)
    dweights = product("bhgqd,bhkd->bhgqk", row.dout, key.v, scores) * factor
    dlogits = weights * (dweights - row.delta[..., None])
    dproducts = dlogits * scores.scale
    if tanh is not None:
        dproducts = dproducts * (1 - tanh * tanh)
    dslopes = None if uncut.slopes is None else sum_to(-dlogits * distance(scores, query, key, dlogits.dtype), uncut.slopes.shape)
    return _Shares(
        dq=product("bhgqk,bhkd->bhgqd", dproducts, key.k, scores),
        dk=product("bhgqk,bhgqd->bhkd", dproducts, query.q, scores),
        dv=product("bhgqk,bhgqd->bhkd", weights * factor, row.dout, scores),
        dbias=None if tile.bias is None else sum_to(dlogits, tile.bias.shape),
        dalibi_slopes=dslopes,
    )
