"""What flash-attn-4's programs (kernels/cute/programs.py) do, in plain JAX: in place of ``calls.call``, with the same operands.

Rows that a program does not cover are NaN in what it returns; masks are aligned to the last query and key of each batch entry; the
backward takes whole tiles of queries, whose statistics alone say which there are; sums are in an order of elements that only
``convert`` undoes. In any dtype: in float32 nothing is rounded. Locks stay as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.kernels.cute.block_sparse import QUERY_BLOCK
from jax_core.kernels.cute.calls import Shaped
from jax_core.kernels.cute.settings import Listed, Settings
from jax_core.kernels.cute.tiles import BackwardTile
from jax_core.masks.static import visible
from jax_core.varying import vary, varying_axes


def call(name: str, settings: Any, inputs, in_place, results) -> tuple[Array, ...]:
    for operand in jax.tree.leaves((inputs, in_place, results), is_leaf=lambda x: isinstance(x, Shaped)):
        assert not any(size % unit for size, unit in zip(operand.array.shape, operand.units, strict=True)), operand
    arrays, changed = (
        jax.tree.map(lambda x: x.array, x, is_leaf=lambda x: isinstance(x, Shaped)) for x in (tuple(inputs), tuple(in_place))
    )
    wanted = [x.array for x in (*in_place, *results)]
    made: tuple[Array, ...]
    if name == "convert":
        made = (_converted(settings, *arrays, shape=wanted[0].shape),)
    else:
        made = (_forward if name == "forward" else _backward)(settings, *arrays, changed=changed)
    assert [x.shape for x in made] == [x.shape for x in wanted], (name, made, wanted)
    return vary(tuple(x.astype(to.dtype) for x, to in zip(made, wanted, strict=True)), varying_axes(arrays, changed))


class _Rows(NamedTuple):
    """Where batch entries are among rows that follow one another (``first`` None: in a dimension of their own)."""

    first: Array | None
    lengths: Array  # [batch]
    longest: int

    def entries(self, x: Array) -> Array:
        """``[rows, ...] -> [batch, longest, ...]``"""
        return x if self.first is None else x.at[self._index()].get(mode="fill", fill_value=0)

    def written(self, x: Array, total: int, over: Array | None = None) -> Array:
        """``[batch, longest, ...] -> [rows, ...]``, as it was before (``over``) where no entry is: NaN."""
        if self.first is None:
            return x
        there = jnp.arange(self.longest) < self.lengths[:, None]
        index = jnp.where(there, self._index(), total)
        before = jnp.full((total, *x.shape[2:]), jnp.nan, x.dtype) if over is None else over.astype(x.dtype)
        return before.at[index].set(x, mode="drop")

    def padded(self, tile: int) -> Array:
        """Of each entry, its first row among rows in whole tiles."""
        assert self.first is not None
        return (self.first + jnp.arange(len(self.lengths)) * tile) // tile * tile

    def _index(self) -> Array:
        assert self.first is not None
        return self.first[:, None] + jnp.arange(self.longest)


def _rows(x: Array | jax.ShapeDtypeStruct, ends: Array | None, used: Array | None) -> _Rows:
    if ends is None:
        return _Rows(None, jnp.full(x.shape[0], x.shape[1]), x.shape[1])
    return _Rows(ends[:-1], ends[1:] - ends[:-1] if used is None else used, x.shape[0])


def _in_tiles(rows: _Rows, tile: int) -> _Rows:
    """With all rows of the last tile of each entry, which may be another's."""
    return rows if rows.first is None else rows._replace(lengths=-(-rows.lengths // tile) * tile)


def _forward(settings, q, k, v, where, lists, arrays, *, changed):
    assert len(changed) <= 1 and not settings.deterministic
    q_rows, k_rows = _rows(q, *where[:2]), _rows(k, *where[2:])
    _, logits, seen = _logits(settings, q_rows.entries(q), k_rows.entries(k), q_rows, k_rows, lists, arrays, False)
    lse = jax.nn.logsumexp(jnp.where(seen, logits, -jnp.inf), axis=-1)
    weights = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("bhqs,bshd->bqhd", weights, _per_query_head(k_rows.entries(v), settings.group))
    if q_rows.first is None:
        return out, lse
    total = q.shape[0]
    return q_rows.written(out, total, *changed), q_rows.written(jnp.swapaxes(lse, 1, 2), total).T


def _backward(settings, q, k, v, dout, lse, delta, where, lists, arrays, *, changed):
    locks = (2 if settings.group > 1 else 1) * settings.deterministic  # dK's and dV's locks are one array
    given = changed[locks:]
    assert len(given) == (3 if settings.group > 1 else 1)
    q_rows, k_rows = _rows(q, *where[:2]), _rows(k, *where[2:])
    query, key, value, dout = q_rows.entries(q), k_rows.entries(k), k_rows.entries(v), q_rows.entries(dout)
    of_tiles = _in_tiles(q_rows, settings.tile.tile_m)
    capped, logits, seen = _logits(settings, query, key, q_rows, k_rows, lists, arrays, True, of_tiles)
    lse, delta = (_statistics(x, q_rows, settings.tile.tile_m)[..., None] for x in (lse, delta))
    weights = jnp.where(seen, jnp.exp2(logits * jnp.log2(jnp.e) - lse), 0)
    dout = dout.astype(jnp.float32)
    products = jnp.einsum("bqhd,bshd->bhqs", dout, _per_query_head(value, settings.group))
    dlogits = weights * (products - delta) * capped
    dq = jnp.einsum("bhqs,bshd->bqhd", dlogits, _per_query_head(key, settings.group))
    dk = _per_key_head(jnp.einsum("bhqs,bqhd->bshd", dlogits, query.astype(jnp.float32)), settings.group)
    dv = _per_key_head(jnp.einsum("bhqs,bqhd->bshd", weights, dout), settings.group)
    if settings.group == 1:
        sums = _added(given[0], dq, of_tiles, settings.tile, "query")
        return *changed[:locks], sums, k_rows.written(settings.scale * dk, k.shape[0]), k_rows.written(dv, k.shape[0])
    grads = (dq, of_tiles, "query"), (dk, k_rows, "key"), (dv, k_rows, "key")
    sums = (_added(before, x, rows, settings.tile, of) for before, (x, rows, of) in zip(changed[-3:], grads, strict=True))
    return *changed[:-3], *sums


def _converted(settings, sums, where, *, shape) -> Array:
    rows, dim = settings.tile.tile_m if settings.of == "query" else settings.tile.tile_n, settings.tile.padded(settings.dim)
    plain = sums.reshape(*sums.shape[:-1], -1, rows * dim)[..., jnp.argsort(_order(rows, dim, settings.of))]
    plain = settings.scale * plain.reshape(*sums.shape[:-1], -1, dim)[..., : settings.dim]
    if where[0] is None:
        return jnp.swapaxes(plain, 1, 2)[:, : shape[1]]
    entries = _rows(jax.ShapeDtypeStruct(shape, plain.dtype), *where)
    index = entries.padded(rows)[:, None] + jnp.arange(entries.longest)
    return entries.written(jnp.swapaxes(plain, 0, 1).at[index].get(mode="fill", fill_value=0), shape[0])


# --------------------------------------------------------------------------------------------------------------- scores


def _logits(settings: Settings, q, k, q_rows, k_rows, lists, arrays, of_queries, of_tiles=None):
    """``[batch, heads, queries, keys]``: the soft cap's derivative, the logits, and which are visible."""
    x = settings.scale * jnp.einsum("bqhd,bshd->bhqs", q.astype(jnp.float32), _per_query_head(k, settings.group))
    seen = _by_place(settings, q_rows, k_rows, of_tiles or q_rows)[:, None]
    if settings.listed is not None:
        seen = seen & _by_lists(settings.listed, settings.tile.tile_n, lists, arrays, x.shape, of_queries)
    if settings.softcap is None:
        return 1.0, x, seen
    tanh = jnp.tanh(x / settings.softcap)
    return 1 - tanh**2, settings.softcap * tanh, seen


def _by_place(settings: Settings, q_rows: _Rows, k_rows: _Rows, of_tiles: _Rows) -> Array:
    """``[batch, queries, keys]``"""
    q_lengths, k_lengths, whole = (x.lengths[:, None, None] for x in (q_rows, k_rows, of_tiles))
    i, j = jnp.arange(q_rows.longest)[:, None], jnp.arange(k_rows.longest)
    seen, ahead = (i < whole) & (j < k_lengths), j - (i + k_lengths - q_lengths)
    assert not (settings.causal and settings.local)
    if settings.causal:
        seen = seen & (ahead <= 0)
    if settings.local and settings.left is not None:
        seen = seen & (-ahead <= settings.left)
    if settings.local and settings.right is not None:
        seen = seen & (ahead <= settings.right)
    return seen


def _by_lists(listed: Listed, key_block: int, lists, arrays, shape, of_queries: bool) -> Array:
    i, j = jnp.arange(shape[2])[:, None], jnp.arange(shape[3])
    tables = _chosen(*lists[:2]), _chosen(*lists[2:])
    partly, fully = ((jnp.swapaxes(x, 1, 2) if of_queries else x)[:, i // QUERY_BLOCK, j // key_block] for x in tables)
    return fully[:, None] | partly[:, None] & _judged(listed, dict(zip(listed.arrays, arrays, strict=True)), i, j)


def _chosen(counts: Array, indices: Array) -> Array:
    """bool ``[batch|1, rows, columns]``"""
    there = jnp.arange(indices.shape[2]) < counts[..., None]
    return (there[..., None] & (indices[..., None] == jnp.arange(indices.shape[2]))).any(2)


def _judged(listed: Listed, there: dict[str, Array], i, j) -> Array:
    """``[batch|1, heads|1, queries, keys]``"""
    seen = jnp.ones((1, 1, i.shape[0], j.shape[0]), bool)
    if listed.static:
        q_at, k_at = _position(there["starts"][0], i)[None], _position(there["starts"][1], j)[None, None]
        if "q_positions" in there:
            q_at, k_at = there["q_positions"][:, :, None], there["k_positions"][:, None]
        seen = seen & visible(listed.mask, q_at, k_at)[:, None]
    if "q_segments" in there:
        q_id, k_id = there["q_segments"][:, None, :, None], there["k_segments"][:, None, None]
        seen = seen & (q_id == k_id) & (q_id >= 0)
    if "bits" in there:
        seen = seen & ((there["bits"][..., i, j // 32] >> (j % 32)) & 1 != 0)
    return seen


def _position(start: Array, index: Array) -> Array:
    first, second, length, stride = start
    return jnp.where(index < length, first + index * stride, second + (index - length) * stride)


def _per_query_head(x: Array, group: int) -> Array:
    return jnp.repeat(x.astype(jnp.float32), group, axis=2)


def _per_key_head(x: Array, group: int) -> Array:
    return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)


# ------------------------------------------------------------------------------------------------- statistics and sums


def _statistics(x: Array, rows: _Rows, tile: int) -> Array:
    """``[batch, heads, longest]``; 0 past the tiles of an entry. In its tiles all is read."""
    if rows.first is None:
        return x[..., : rows.longest]
    index = rows.padded(tile)[:, None] + jnp.arange(rows.longest)
    found = jnp.moveaxis(x.at[:, index].get(mode="fill", fill_value=jnp.nan), 0, 1)
    read = jnp.arange(rows.longest) < -(-rows.lengths // tile)[:, None] * tile
    return jnp.where(read[:, None], found, 0)


def _order(rows: int, dim: int, of: str) -> Array:
    """Where in a tile ``[rows, dim]`` the elements are that its sums hold, in order: columns first; those of queries backwards."""
    order = jnp.arange(rows * dim).reshape(rows, dim).T.reshape(-1)
    return order[::-1] if of == "query" else order


def _added(sums: Array, x: Array, rows: _Rows, tile: BackwardTile, of: str) -> Array:
    """``x [batch, longest, heads, dim]`` added to the sums of its rows, in whole tiles."""
    tile_rows, (batch, length, heads, dim) = tile.tile_m if of == "query" else tile.tile_n, x.shape
    padded, whole = tile.padded(dim), -(-length // tile_rows) * tile_rows
    there = jnp.arange(length) < rows.lengths[:, None]
    x = jnp.where(there[..., None, None], x, 0)
    x = jnp.moveaxis(jnp.pad(x, [(0, 0), (0, whole - length), (0, 0), (0, padded - dim)]), 2, 1)
    x = x.reshape(batch, heads, -1, tile_rows * padded)[..., _order(tile_rows, padded, of)].reshape(batch, heads, -1)
    if rows.first is None:
        return sums + x
    index = rows.padded(tile_rows)[:, None] * padded + jnp.arange(whole * padded)
    return sums.at[:, index].add(jnp.moveaxis(x, 0, 1), mode="drop")
