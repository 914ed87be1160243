"""The kernel in plain XLA: blockwise online softmax on any device, after FlashAttention (Dao et al. 2022, arXiv:2205.14135).

Both shards are cut into blocks; scores exist one ``[batch, heads, q_block, k_block]`` block at a time, and a block that the masks
leave empty is skipped. The backward computes the scores again and makes dQ, dK and dV in one sweep.

Inside, query heads stand as ``[kv_heads, group]``. Names of dimensions in comments: n/m query and key blocks, b batch, h key/value
heads, g group, q and k positions in a block, d dim.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_core.block import Extras, Grads, Partial, Scores, accumulation_dtype
from jax_core.config import FwdParams
from jax_core.dropout import keep_mask
from jax_core.layout import Run
from jax_core.mask import empty, visible
from jax_core.predicate import Predicate
from jax_core.varying import vary, varying_axes

FUSED_BACKWARD = True


def unsupported(scores: Scores, config: FwdParams) -> str | None:
    del scores  # every mask and every score
    if config.num_stages is not None or config.num_warps is not None:
        return "the xla kernel has no stages or warps; leave num_stages and num_warps None"
    return None


class _Side(NamedTuple):
    """What the masks need to know of one side's positions, in blocks."""

    index: Any  # [n, q] in the whole sequence
    position: Any  # [n, b|1, q], the index unless position ids replace it
    segment: Any  # [n, b|1, q] or None
    real: Any  # [n, q] False on padding up to a whole block, or None without any


class _Queries(NamedTuple):
    q: Any  # [n, b, h, g, q, d]
    side: _Side


class _Keys(NamedTuple):
    k: Any  # [m, b, h, k, d]
    v: Any
    side: _Side


class _Tiles(NamedTuple):
    """What belongs to a pair of blocks, ``[n, m, ...]``."""

    needed: Any  # bool
    bias: Any  # [n, m, b|1, h|1, g|1, q, k] or None
    mask: Any


class _State(NamedTuple):
    """The online softmax of a query block: numerator, running maximum, denominator."""

    numerator: Any  # [b, h, g, q, d]
    maximum: Any  # [b, h, g, q]
    denominator: Any


def forward(q, k, v, q_runs, k_runs, *, scores: Scores, extras: Extras, carry: Partial, config: FwdParams) -> Partial:
    queries, keys, tiles, rest = _blocks(q, k, v, q_runs, k_runs, scores, extras, config)
    start = _start(carry, queries.q.shape[2], queries.q.shape[4])

    def query_block(_, block):
        query, row, state = block
        state, _ = lax.scan(partial(_update_unless_empty, scores, rest, query), state, (keys, row))
        return None, _finish(state)

    _, (out, lse) = lax.scan(query_block, None, (queries, tiles, start))
    return Partial(_join_rows(out, q.shape[1]), _join_heads(lse, q.shape[1]))


def _update_unless_empty(scores, rest, query, state, block):
    key, tile = block
    update = partial(_update, scores, rest, query, key, tile)
    return lax.cond(tile.needed, update, lambda state: state, state), None


def _update(scores, rest, query: _Queries, key: _Keys, tile: _Tiles, state: _State) -> _State:
    logits, _ = _logits(scores, rest, query, key, tile)
    maximum = jnp.maximum(state.maximum, logits.max(-1))
    finite = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(logits - finite[..., None])
    decay = jnp.exp(state.maximum - finite)
    denominator = state.denominator * decay + weights.sum(-1)
    kept = weights * _dropout_factor(scores, rest, query, key, weights.dtype)
    numerator = state.numerator * decay[..., None] + _product("bhgqk,bhkd->bhgqd", kept, key.v, scores)
    return _State(numerator, maximum, denominator)


def _start(carry: Partial, kv_heads: int, size: int) -> _State:
    """The state of every query block: a partial is normalised, so its denominator is 1 at the maximum ``lse``, or 0 without keys."""
    lse = _split_heads(carry.lse, kv_heads, size, -jnp.inf)
    return _State(_split_rows(carry.out, kv_heads, size), lse, jnp.where(jnp.isneginf(lse), 0, jnp.ones_like(lse)))


def _finish(state: _State) -> tuple:
    some = state.denominator > 0
    denominator = jnp.where(some, state.denominator, 1)
    maximum = jnp.where(some, state.maximum, 0)
    return state.numerator / denominator[..., None], jnp.where(some, maximum + jnp.log(denominator), -jnp.inf)


class _Rows(NamedTuple):
    """What the backward knows of each query row, in blocks."""

    dout: Any  # [n, b, h, g, q, d]
    lse: Any  # [n, b, h, g, q]
    delta: Any


class _Shares(NamedTuple):
    """A pair of blocks' share of the gradients."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dalibi_slopes: Any


def backward(q, k, v, dout, lse, delta, q_runs, k_runs, *, scores: Scores, extras: Extras, config: FwdParams) -> Grads:
    queries, keys, tiles, rest = _blocks(q, k, v, q_runs, k_runs, scores, extras, config)
    kv_heads, size = queries.q.shape[2], queries.q.shape[-2]
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # exp(x - inf) is 0: a row that saw no key, or stands for padding
    rows = _Rows(
        _split_rows(dout, kv_heads, size), _split_heads(lse, kv_heads, size, jnp.inf), _split_heads(delta, kv_heads, size, 0)
    )
    columns = jax.tree.map(lambda tile: jnp.swapaxes(tile, 0, 1), tiles)
    dtype = accumulation_dtype(q.dtype)
    zero = partial(_zero_shares, queries, keys, tiles, rest, dtype)

    def key_block(totals, block):
        key, column = block

        def query_block(totals, block):
            number, query, row, tile = block
            share = partial(_shares, scores, rest, query, row, key, tile)
            share = lax.cond(tile.needed, lambda _: share(), lambda _: zero(), None)
            dq, dk, dv, dslopes = totals
            totals = dq.at[number].add(share.dq), dk + share.dk, dv + share.dv, _add(dslopes, share.dalibi_slopes)
            return totals, share.dbias

        dq, dslopes = totals
        nothing = zero()
        numbers = jnp.arange(queries.q.shape[0])
        (dq, dk, dv, dslopes), dbias = lax.scan(
            query_block, (dq, nothing.dk, nothing.dv, dslopes), (numbers, queries, rows, column)
        )
        return (dq, dslopes), (dk, dv, dbias)

    dq = vary(jnp.zeros(queries.q.shape, dtype), varying_axes(queries, keys))
    (dq, dslopes), (dk, dv, dbias) = lax.scan(key_block, (dq, zero().dalibi_slopes), (keys, columns))
    return Grads(
        _join_rows(dq, q.shape[1]),
        _join_keys(dk, k.shape[1]),
        _join_keys(dv, k.shape[1]),
        None if dbias is None else _join_tiles(dbias, extras.bias.shape),
        None if dslopes is None else dslopes.reshape(extras.alibi_slopes.shape),
    )


def _zero_shares(queries, keys, tiles, rest, dtype) -> _Shares:
    def zeros(array, leading):
        return None if array is None else jnp.zeros(array.shape[leading:], dtype)

    shares = _Shares(zeros(queries.q, 1), zeros(keys.k, 1), zeros(keys.v, 1), zeros(tiles.bias, 2), zeros(rest.slopes, 0))
    return vary(shares, varying_axes(queries, keys))


def _add(total, share):
    return None if total is None else total + share


def _shares(scores: Scores, rest, query: _Queries, row: _Rows, key: _Keys, tile: _Tiles) -> _Shares:
    logits, tanh = _logits(scores, rest, query, key, tile)
    weights = jnp.exp(logits - row.lse[..., None])
    factor = _dropout_factor(scores, rest, query, key, weights.dtype)
    dweights = _product("bhgqd,bhkd->bhgqk", row.dout, key.v, scores) * factor
    dlogits = weights * (dweights - row.delta[..., None])
    dproducts = dlogits * scores.scale
    if tanh is not None:
        dproducts = dproducts * (1 - tanh * tanh)
    return _Shares(
        dq=_product("bhgqk,bhkd->bhgqd", dproducts, key.k, scores),
        dk=_product("bhgqk,bhgqd->bhkd", dproducts, query.q, scores),
        dv=_product("bhgqk,bhgqd->bhkd", weights * factor, row.dout, scores),
        dbias=None if tile.bias is None else _sum_to(dlogits, tile.bias.shape),
        dalibi_slopes=None if rest.slopes is None else _sum_to(-dlogits * _distance(query, key), rest.slopes.shape),
    )


# What a score is: one place for the forward and the backward.


class _Rest(NamedTuple):
    """Operands that no block cuts."""

    slopes: Any  # [b|1, h, g, 1, 1] or None
    seed: Any
    batch: Any  # [b] global numbers
    head: Any  # [h, g] global numbers
    predicate_arrays: tuple


def _logits(scores: Scores, rest: _Rest, query: _Queries, key: _Keys, tile: _Tiles):
    """The block's logits, ``-inf`` where a mask hides them, and the soft cap's tanh or None."""
    x = _product("bhgqd,bhkd->bhgqk", query.q, key.k, scores)
    if scores.logits_dtype is not None:
        x = x.astype(scores.logits_dtype).astype(x.dtype)
    x, tanh = x * scores.scale, None
    if scores.softcap is not None:
        tanh = jnp.tanh(x / scores.softcap)
        x = tanh * scores.softcap
    if tile.bias is not None:
        x = x + tile.bias.astype(x.dtype)
    if rest.slopes is not None:
        x = x - rest.slopes.astype(x.dtype) * _distance(query, key).astype(x.dtype)
    return jnp.where(_visible(scores, rest, query.side, key.side, tile), x, -jnp.inf), tanh


def _visible(scores: Scores, rest: _Rest, q: _Side, k: _Side, tile: _Tiles):
    """Broadcasts to ``[b, h, g, q, k]``."""
    seen = visible(scores.mask, _over_queries(q.position), _over_keys(k.position))
    if q.segment is not None:
        q_segment, k_segment = _over_queries(q.segment), _over_keys(k.segment)
        seen = seen & (q_segment == k_segment) & (q_segment >= 0)
    if k.real is not None:
        seen = seen & k.real
    if tile.mask is not None:
        seen = seen & tile.mask
    for predicate, arrays in zip(scores.predicates, rest.predicate_arrays, strict=True):
        seen = seen & _evaluate(predicate, arrays, rest, q, k)
    return seen


def _evaluate(predicate: Predicate, arrays, rest: _Rest, q: _Side, k: _Side):
    """The predicate on every element: mapped over keys, queries, the two head dimensions and the batch."""
    q_at, k_at = (q.position, k.position) if predicate.over == "position" else (q.index[None], k.index[None])
    count = rest.batch.shape[0]
    q_at, k_at = (jnp.broadcast_to(at, (count, at.shape[-1])) for at in (q_at, k_at))
    arguments = vary((rest.batch, rest.head, q_at, k_at), varying_axes(rest, q, k))
    function = partial(predicate.apply, arrays)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (None, 0, None, None), (0, None, 0, 0)):
        function = jax.vmap(function, axes)
    return function(*arguments)


def _dropout_factor(scores: Scores, rest: _Rest, query: _Queries, key: _Keys, dtype):
    if not scores.dropout_prob:
        return jnp.ones((), dtype)
    kept = keep_mask(
        rest.seed,
        rest.batch[:, None, None, None, None],
        rest.head[None, :, :, None, None],
        query.side.index[:, None],
        key.side.index[None, :],
        scores.dropout_prob,
    )
    return kept.astype(dtype) / (1 - scores.dropout_prob)


def _distance(query: _Queries, key: _Keys):
    return jnp.abs(_over_queries(query.side.position) - _over_keys(key.side.position))


def _over_queries(x):
    """``[b|1, q] -> [b|1, 1, 1, q, 1]``"""
    return x[:, None, None, :, None]


def _over_keys(x):
    """``[b|1, k] -> [b|1, 1, 1, 1, k]``"""
    return x[:, None, None, None, :]


def _product(formula: str, a, b, scores: Scores):
    """A matrix product in the accumulation dtype."""
    dtype = accumulation_dtype(b.dtype)
    precision = scores.precision or lax.Precision.HIGHEST
    return jnp.einsum(formula, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=dtype)


def _sum_to(x, shape):
    """Sums the dimensions that are 1 in ``shape``."""
    return x.sum([i for i, length in enumerate(shape) if length == 1 and x.shape[i] != 1], keepdims=True)


# Cutting into blocks, and joining them.


def _blocks(q, k, v, q_runs, k_runs, scores: Scores, extras: Extras, config: FwdParams):
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    q_size, k_size = _block_size(q_runs, config.q_blocksize), _block_size(k_runs, config.kv_blocksize)
    # Every value gets the same type under shard_map's check_vma, so that loops and branches agree.
    axes = varying_axes(q, k, v, extras, [run.start for run in (*q_runs, *k_runs)])
    q_side = _side(q_runs, q_size, extras.q_position_ids, extras.q_segment_ids)
    k_side = _side(k_runs, k_size, extras.kv_position_ids, extras.kv_segment_ids)
    tiles = _Tiles(
        ~_empty(scores, q_side, k_side),
        _split_tiles(extras.bias, kv_heads, group, q_size, k_size),
        _split_tiles(extras.mask, kv_heads, group, q_size, k_size),
    )
    batch0, head0 = (0, 0) if extras.origin is None else (extras.origin[0], extras.origin[1])
    slopes = extras.alibi_slopes
    rest = _Rest(
        None if slopes is None else slopes.reshape(-1, kv_heads, group, 1, 1),
        extras.dropout_seed,
        batch0 + jnp.arange(q.shape[0], dtype=jnp.int32),
        head0 + jnp.arange(q.shape[2], dtype=jnp.int32).reshape(kv_heads, group),
        (),
    )
    queries = _Queries(_split_rows(q, kv_heads, q_size), q_side)
    keys = _Keys(_split_keys(k, k_size), _split_keys(v, k_size), k_side)
    queries, keys, tiles, rest = vary((queries, keys, tiles, rest), axes)
    return queries, keys, tiles, rest._replace(predicate_arrays=extras.predicate_arrays)


def _block_size(runs: tuple[Run, ...], wanted: int) -> int:
    return min(wanted, runs[0].length)


def _side(runs: tuple[Run, ...], size: int, position_ids, segment_ids) -> _Side:
    index = jnp.concatenate([run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32) for run in runs])
    length = index.shape[0]
    position = index[None] if position_ids is None else position_ids
    real = None if length % size == 0 else _split(jnp.arange(length) >= 0, 0, size, False)
    segment = None if segment_ids is None else _split(segment_ids, 1, size)
    return _Side(_split(index, 0, size), _split(position, 1, size), segment, real)


def _empty(scores: Scores, q: _Side, k: _Side):
    """``[n, m]``: no pair of the blocks is visible, as far as positions and segments bound them."""
    q_run, k_run = _bounds(q.position), _bounds(k.position)
    none = empty(scores.mask, _expand(q_run, 1), _expand(k_run, 0))
    if q.segment is not None:
        (q_low, q_high), (k_low, k_high) = _range(q.segment), _range(k.segment)
        none = none | (q_high < 0)[:, None] | (q_high[:, None] < k_low) | (k_high < q_low[:, None])
    return jnp.broadcast_to(none, (q.index.shape[0], k.index.shape[0]))


class _Bounds(NamedTuple):
    """A run by its first and last position, as :func:`jax_core.mask.empty` reads it: ``start + stride * (length - 1)``."""

    start: Any
    stride: Any
    length: int


def _bounds(position) -> _Bounds:
    low, high = _range(position)
    return _Bounds(low, high - low, 2)


def _expand(bounds: _Bounds, axis: int) -> Any:
    return _Bounds(jnp.expand_dims(bounds.start, axis), jnp.expand_dims(bounds.stride, axis), bounds.length)


def _range(x):
    """``[n, b, q] -> ([n], [n])``: the least and the greatest of each block."""
    return x.min((1, 2)), x.max((1, 2))


def _split(x, axis: int, size: int, fill=None):
    """Cuts ``axis`` into blocks of ``size``, which become the leading axis; the last is filled up (None: with its last value)."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, mode="edge") if fill is None else jnp.pad(x, pad, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _split_rows(x, kv_heads: int, size: int):
    """``[b, length, h*g, d] -> [n, b, h, g, q, d]``"""
    blocks = _split(x, 1, size, 0)
    n, b, q, heads, d = blocks.shape
    return blocks.reshape(n, b, q, kv_heads, heads // kv_heads, d).transpose(0, 1, 3, 4, 2, 5)


def _join_rows(blocks, length: int):
    n, b, h, g, q, d = blocks.shape
    return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * q, h * g, d)[:, :length]


def _split_heads(x, kv_heads: int, size: int, fill):
    """``[b, h*g, length] -> [n, b, h, g, q]``"""
    blocks = _split(x, 2, size, fill)
    n, b, heads, q = blocks.shape
    return blocks.reshape(n, b, kv_heads, heads // kv_heads, q)


def _join_heads(blocks, length: int):
    n, b, h, g, q = blocks.shape
    return blocks.transpose(1, 2, 3, 0, 4).reshape(b, h * g, n * q)[..., :length]


def _split_keys(x, size: int):
    """``[b, length, h, d] -> [m, b, h, k, d]``"""
    return jnp.swapaxes(_split(x, 1, size, 0), 2, 3)


def _join_keys(blocks, length: int):
    m, b, h, k, d = blocks.shape
    return blocks.transpose(1, 0, 3, 2, 4).reshape(b, m * k, h, d)[:, :length]


def _split_tiles(x, kv_heads: int, group: int, q_size: int, k_size: int):
    """``[b|1, h*g|1, q_length, k_length] -> [n, m, b|1, h|1, g|1, q, k]``"""
    if x is None:
        return None
    blocks = _split(_split(x, 3, k_size, 0), 3, q_size, 0)
    heads = (kv_heads, group) if x.shape[1] != 1 else (1, 1)
    n, m, b, _, q, k = blocks.shape
    return blocks.reshape(n, m, b, *heads, q, k)


def _join_tiles(blocks, shape):
    """``[m, n, b|1, h|1, g|1, q, k]`` back to ``shape``."""
    m, n, b, h, g, q, k = blocks.shape
    return blocks.transpose(2, 3, 4, 1, 5, 0, 6).reshape(b, h * g, n * q, m * k)[..., : shape[2], : shape[3]]
