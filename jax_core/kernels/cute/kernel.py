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
from jax_core.kernels.contract import Grads, Pair, Partial, Problem, Residuals, Scores
from jax_core.kernels.cute import calls, pairs
from jax_core.kernels.cute.calls import Shaped, call
from jax_core.kernels.cute.lists import Lists, make_lists
from jax_core.kernels.cute.settings import Settings
from jax_core.kernels.cute.sums import Sums, converted, rows_of, zeros
from jax_core.kernels.cute.tiles import TILES, BackwardTile, ForwardTile
from jax_core.masks.static import Mask

CONTINUES = False


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    del problem
    return FwdParams(), BwdParams()


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: FwdParams) -> Partial:
    """``out`` is in the query's dtype, whatever ``out_dtype``; a row that sees no key of the pair has LSE -inf and any output."""
    assert carry is None
    del out_dtype, config
    (q, k, v), listed = pair.shards, _listed(pair)
    tile = TILES[calls.capability()].forward(q.shape[3], v.shape[3], pair.diagonal and pair.scores.mask != Mask(), listed)
    plan = _make_plan(pair, tile, listed)
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    lse = jax.ShapeDtypeStruct((heads, batch * length) if plan.packed else (batch, heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    inputs = [plan.rows(q, group), plan.rows(k), plan.rows(v), *plan.extras]
    results = [plan.rows(out, group), Shaped(lse, (*(1,) * (lse.ndim - 2), group, 1))]
    made, sums = call("forward", plan.settings, inputs, [], results)
    if plan.packed:
        sums = jnp.swapaxes(sums.reshape(heads, batch, length), 0, 1)
    if plan.area is not None:
        sums = jnp.where(jnp.arange(length) >= plan.area.q_first, sums, -jnp.inf)
    return Partial(made.reshape(out.shape), sums)


def backward(pair: Pair, residuals: Residuals, dq: Sums | None, config: BwdParams, *, fused: bool, deterministic: bool) -> Grads:
    del fused, config  # one sweep in any case
    (q, k, v), listed = pair.shards, _listed(pair)
    tile = TILES[calls.capability()].backward(q.shape[3], v.shape[3], pair.scores.mask != Mask(), listed)
    plan = _make_plan(pair, tile, listed)
    settings, group = replace(plan.settings, deterministic=deterministic), q.shape[2] // k.shape[2]
    statistics = [(residuals.lse / math.log(2), math.inf), (residuals.delta, 0)]
    inputs = [plan.rows(q, group), plan.rows(k), plan.rows(v), plan.rows(residuals.dout.astype(q.dtype), group)]
    inputs += [_statistics(x, fill, tile.tile_m, group, plan) for x, fill in statistics]
    packed = pairs.packs(pair, listed)
    sums = [zeros(q, "query", tile, packed) if dq is None else dq]
    if group > 1:
        # Two equal arrays that a call changes would become one in XLA (``_locks``): dV starts from negative zeros.
        sums += [zeros(x, "key", tile, packed, after=dq, zero=zero) for x, zero in ((k, 0.0), (v, -0.0))]
    in_place = _locks(q, k, tile) if deterministic else []
    in_place += [x.shaped(plan.packed, group if x is sums[0] else 1) for x in sums]
    results = [] if group > 1 else [plan.rows(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)]
    found = call("backward", settings, [*inputs, *plan.extras], in_place, results)[-3:]
    if group > 1:
        made = [x.filled(values) for x, values in zip(sums, found, strict=True)]
        return Grads(made[0], made[1], made[2], None, None)
    dk, dv = (_covered(values.reshape(x.shape), plan) for values, x in zip(found[1:], (k, v), strict=True))
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


class _Plan(NamedTuple):
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


def _make_plan(pair: Pair, tile: ForwardTile | BackwardTile, listed: bool) -> _Plan:
    (q, k, v), scores = pair.shards, pair.scores
    settings = Settings(
        capability=calls.capability(),
        dtype=str(q.dtype),
        dim=q.shape[3],
        value_dim=v.shape[3],
        group=q.shape[2] // k.shape[2],
        scale=scores.scale,
        tile=tile,
        softcap=scores.softcap,
    )
    if listed:
        lists = make_lists(pair, tile.tile_n, isinstance(tile, BackwardTile))
        return _Plan(False, pairs.WHOLE, None, lists, replace(settings, listed=lists.listed))
    if pairs.is_within(scores.mask):
        area = pairs.within(pair)
        return _Plan(True, pairs.where_of(area, pair), area, None, _with_mask(settings, scores.mask))
    if not pair.diagonal and scores.mask.causal:
        area = pairs.rectangle(pair)
        return _Plan(True, pairs.where_of(area, pair), area, None, settings)
    settings = _with_mask(settings, scores.mask)
    if pairs.packs(pair, listed):
        where = pairs.offsets(q.shape[0], q.shape[1]), None, pairs.offsets(k.shape[0], k.shape[1]), None
        return _Plan(True, where, None, None, settings)
    return _Plan(False, pairs.WHOLE, None, None, settings)


def _with_mask(settings: Settings, mask: Mask) -> Settings:
    """flash-attn-4 aligns masks to the last query and key, which are at the same position where there is a mask."""
    if mask.left is None and mask.right is None:
        return replace(settings, causal=mask.causal)
    return replace(settings, local=True, left=mask.left, right=0 if mask.causal else mask.right)


def _listed(pair: Pair) -> bool:
    has_data = any(x is not None for x in (pair.extras.mask, pair.extras.q_segment_ids, pair.extras.q_position_ids))
    scattered, same_length = max(len(pair.q_runs), len(pair.k_runs)) > 2, pair.q.shape[1] == pair.k.shape[1]
    return pairs.needs_lists(pair.scores, has_data, pairs.is_static(pair.q_runs), same_length, scattered)


def _statistics(x: Array, fill: float, tile_m: int, group: int, plan: _Plan) -> Shaped:
    """``[batch, heads, length]`` as the backward reads it: rows in whole tiles, between packed batch entries a tile of padding."""
    batch, heads, length = x.shape
    padding = -length % tile_m if batch == 1 or not plan.packed else tile_m
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)], constant_values=fill)
    if plan.packed:
        x = jnp.swapaxes(x, 0, 1).reshape(heads, -1)
    return Shaped(x, (*(1,) * (x.ndim - 2), group, tile_m))


def _locks(q: Array, k: Array, tile: BackwardTile) -> list[Shaped]:
    """Zeros: one counter for each query block, and where heads share K/V two for each key block, dK's and dV's.

    Those two are one array: of equal arrays XLA makes one, which a fusion of the call with slices of its operands (jax 0.11.1 and
    later) has once, and results that are aliased to it share its memory. With one counter for both every block waits for itself.
    """
    batch, length, heads, _ = q.shape
    shapes = [(batch, heads, -(-length // tile.tile_m), 1)]
    if heads != k.shape[2]:
        shapes.append((batch, k.shape[2], -(-k.shape[1] // tile.tile_n), 2))
    return [Shaped(jnp.zeros(shape, jnp.int32), (1, 1, 1, shape[3])) for shape in shapes]


def _covered(gradient: Array, plan: _Plan) -> Array:
    """In float32, 0 in the rows that the call left as they were."""
    gradient = gradient.astype(jnp.float32)
    if plan.area is None:
        return gradient
    rows = jnp.arange(gradient.shape[1])
    covered = (rows >= plan.area.k_first) & (rows < plan.area.k_end)
    return jnp.where(covered[:, None, None], gradient, 0)
