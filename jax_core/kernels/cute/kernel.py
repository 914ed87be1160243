"""flash-attn-4's kernels for Hopper under the kernel contract (Dao et al., github.com/Dao-AILab/flash-attention, flash_attn/cute).

A pair of shards is one call: dense; or a rectangle of packed rows (pairs.py); or with lists of blocks (lists.py). Partial outputs
are in 16 bits, and the ring joins several at once in one pass. In the backward dQ is accumulated in float32 by the kernel itself,
in its own order of elements, from the first pair to the last; where heads share K/V, so are dK and dV, and those sums are what the
ring sends. ``finish`` converts them once. Without shared heads dK and dV are rounded once for each pair of shards.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Extras, Grads, Partial, Problem, Residuals, Runs, Scores
from jax_core.kernels.cute import pairs
from jax_core.kernels.cute.calls import Shaped, call
from jax_core.kernels.cute.lists import Lists, make_lists
from jax_core.kernels.cute.settings import Settings
from jax_core.kernels.cute.sums import Sums, converted, rows_of, zeros
from jax_core.kernels.cute.tiles import BackwardTile, ForwardTile, backward_tile, forward_tile
from jax_core.masks.static import Mask

CONTINUES = False


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    del problem
    return FwdParams(), BwdParams()


def forward(
    q: Array,
    k: Array,
    v: Array,
    q_runs: Runs,
    k_runs: Runs,
    *,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    carry: Partial | None,
    out_dtype: DTypeLike,
    config: FwdParams,
) -> Partial:
    """``out`` is in the query's dtype, whatever ``out_dtype``; a row that sees no key of the pair has LSE -inf and any output."""
    assert carry is None
    del out_dtype, config
    listed = _listed(q, k, q_runs, k_runs, scores, extras)
    tile = forward_tile(q.shape[3], v.shape[3], diagonal and scores.mask != Mask(), listed)
    pair = _make_pair((q, k, v), q_runs, k_runs, diagonal, scores, extras, tile, listed)
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    lse = jax.ShapeDtypeStruct((heads, batch * length) if pair.packed else (batch, heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    inputs = [pair.rows(q, group), pair.rows(k), pair.rows(v), *pair.extras]
    results = [pair.rows(out, group), Shaped(lse, (*(1,) * (lse.ndim - 2), group, 1))]
    made, sums = call("forward", pair.settings, inputs, [], results)
    if pair.packed:
        sums = jnp.swapaxes(sums.reshape(heads, batch, length), 0, 1)
    if pair.area is not None:
        sums = jnp.where(jnp.arange(length) >= pair.area.q_first, sums, -jnp.inf)
    return Partial(made.reshape(out.shape), sums)


def backward(
    q: Array,
    k: Array,
    v: Array,
    residuals: Residuals,
    q_runs: Runs,
    k_runs: Runs,
    *,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    dq: Sums | None,
    fused: bool,
    deterministic: bool,
    config: BwdParams,
) -> Grads:
    del fused, config  # one sweep in any case
    listed = _listed(q, k, q_runs, k_runs, scores, extras)
    tile = backward_tile(q.shape[3], v.shape[3], scores.mask != Mask(), listed)
    pair = _make_pair((q, k, v), q_runs, k_runs, diagonal, scores, extras, tile, listed)
    settings, group = replace(pair.settings, deterministic=deterministic), q.shape[2] // k.shape[2]
    statistics = [(residuals.lse / math.log(2), math.inf), (residuals.delta, 0)]
    inputs = [pair.rows(q, group), pair.rows(k), pair.rows(v), pair.rows(residuals.dout.astype(q.dtype), group)]
    inputs += [_statistics(x, fill, tile.tile_m, group, pair) for x, fill in statistics]
    packed = pairs.packs(scores, listed, q_runs, q.shape[0])
    sums = [zeros(q, "query", tile, packed) if dq is None else dq]
    if group > 1:
        # Of two equal arrays that are to be changed XLA would make one and copy it: dV starts from negative zeros.
        sums += [zeros(x, "key", tile, packed, after=dq, zero=zero) for x, zero in ((k, 0.0), (v, -0.0))]
    in_place = _locks(q, k, tile) if deterministic else []
    in_place += [x.shaped(pair.packed, group if x is sums[0] else 1) for x in sums]
    results = [] if group > 1 else [pair.rows(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)]
    found = call("backward", settings, [*inputs, *pair.extras], in_place, results)[-3:]
    if group > 1:
        made = [x.filled(values) for x, values in zip(sums, found, strict=True)]
        return Grads(made[0], made[1], made[2], None, None)
    dk, dv = (_covered(values.reshape(x.shape), pair) for values, x in zip(found[1:], (k, v), strict=True))
    return Grads(sums[0].filled(found[0]), dk, dv, None, None)


def finish(operands: tuple[Array, Array, Array], grads: tuple[Any, Any, Any], scores: Scores) -> tuple[Array, Array, Array]:
    """The sums over all pairs as gradients in their operands' dtype."""
    factors = scores.scale, scores.scale, 1.0
    made = (
        converted(x, operand, factor) if isinstance(x, Sums) else x.astype(operand.dtype)
        for x, operand, factor in zip(grads, operands, factors, strict=True)
    )
    dq, dk, dv = made
    return dq, dk, dv


class _Pair(NamedTuple):
    """How a pair of shards is computed. ``packed``: batch entries follow one another, and ``where`` says which rows are covered
    (``area``: the same as numbers; None: all)."""

    packed: bool
    where: pairs.Where
    area: pairs.Rectangle | None
    lists: Lists | None
    settings: Settings

    def rows(self, x: Any, group: int = 1) -> Shaped:
        """An operand or result ``[batch, length, heads, dim]``, of whose heads the program knows that ``group`` divides them."""
        return rows_of(x, group, self.packed)

    @property
    def extras(self) -> tuple:
        """The middle arguments of the programs."""
        where = tuple(None if x is None else Shaped(x, (1,)) for x in self.where)
        return where, *((None, None) if self.lists is None else (self.lists.blocks, self.lists.arrays))


def _make_pair(
    shards: tuple[Array, Array, Array],
    q_runs: Runs,
    k_runs: Runs,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    tile: ForwardTile | BackwardTile,
    listed: bool,
) -> _Pair:
    q, k, v = shards
    settings = Settings(
        dtype=str(q.dtype),
        dim=q.shape[3],
        value_dim=v.shape[3],
        group=q.shape[2] // k.shape[2],
        scale=scores.scale,
        tile=tile,
        softcap=scores.softcap,
    )
    if listed:
        lists = make_lists(shards, q_runs, k_runs, scores, extras, tile.tile_n, isinstance(tile, BackwardTile))
        return _Pair(False, pairs.WHOLE, None, lists, replace(settings, listed=lists.listed))
    if pairs.is_within(scores.mask):
        area = pairs.within(scores.mask, q_runs, k_runs)
        where = pairs.where_of(area, q.shape[0], q.shape[1], k.shape[1])
        return _Pair(True, where, area, None, _with_mask(settings, scores.mask))
    if not diagonal and scores.mask.causal:
        area = pairs.rectangle(q_runs, k_runs, q.shape[1], k.shape[1])
        return _Pair(True, pairs.where_of(area, q.shape[0], q.shape[1], k.shape[1]), area, None, settings)
    settings = _with_mask(settings, scores.mask)
    if pairs.packs(scores, listed, q_runs, q.shape[0]):
        where = pairs.offsets(q.shape[0], q.shape[1]), None, pairs.offsets(k.shape[0], k.shape[1]), None
        return _Pair(True, where, None, None, settings)
    return _Pair(False, pairs.WHOLE, None, None, settings)


def _with_mask(settings: Settings, mask: Mask) -> Settings:
    """flash-attn-4 aligns masks to the last query and key, which are at the same position where there is a mask."""
    if mask.left is None and mask.right is None:
        return replace(settings, causal=mask.causal)
    return replace(settings, local=True, left=mask.left, right=0 if mask.causal else mask.right)


def _listed(q: Array, k: Array, q_runs: Runs, k_runs: Runs, scores: Scores, extras: Extras) -> bool:
    has_data = any(x is not None for x in (extras.mask, extras.q_segment_ids, extras.q_position_ids))
    scattered = max(len(q_runs), len(k_runs)) > 2
    return pairs.needs_lists(scores, has_data, pairs.is_static(q_runs), q.shape[1] == k.shape[1], scattered)


def _statistics(x: Array, fill: float, tile_m: int, group: int, pair: _Pair) -> Shaped:
    """``[batch, heads, length]`` as the backward reads it: rows in whole tiles, between packed batch entries a tile of padding."""
    batch, heads, length = x.shape
    padding = -length % tile_m if batch == 1 or not pair.packed else tile_m
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)], constant_values=fill)
    if pair.packed:
        x = jnp.swapaxes(x, 0, 1).reshape(heads, -1)
    return Shaped(x, (*(1,) * (x.ndim - 2), group, tile_m))


def _locks(q: Array, k: Array, tile: BackwardTile) -> list[Shaped]:
    """Zeros: one counter for each query block, and where heads share K/V two for each key block."""
    batch, length, heads, _ = q.shape
    shapes = [(batch, heads, -(-length // tile.tile_m), 1)]
    if heads != k.shape[2]:
        shapes += [(batch, k.shape[2], -(-k.shape[1] // tile.tile_n), 2)] * 2
    return [Shaped(jnp.zeros(shape, jnp.int32), (1, 1, 1, shape[3])) for shape in shapes]


def _covered(gradient: Array, pair: _Pair) -> Array:
    """In float32, 0 in the rows that the call left as they were."""
    gradient = gradient.astype(jnp.float32)
    if pair.area is None:
        return gradient
    rows = jnp.arange(gradient.shape[1])
    covered = (rows >= pair.area.k_first) & (rows < pair.area.k_end)
    return jnp.where(covered[:, None, None], gradient, 0)
