"""flash-attn-4's kernels for Hopper under the kernel contract (Dao et al., github.com/Dao-AILab/flash-attention, flash_attn/cute).

A pair of shards is one call: dense; or a rectangle of packed rows, or one for each document (rectangles.py); or block-sparse
(block_sparse.py). Partial outputs are in 16 bits, and the ring joins several at once in one pass. In the backward the kernel itself
accumulates dQ in float32, in its own order of elements, from the first pair to the last; where heads share K/V, dK and dV too, and
the ring sends these sums. ``finish`` converts them once. Without shared heads dK and dV are rounded once for each
pair of shards; with documents in any case, and dQ of a rank's own documents once more: their sums lie in tiles of their own, to
which no other pair can add.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, KernelConfig, Pair, Partial, Residuals, Scores
from jax_core.kernels.cute import rectangles
from jax_core.kernels.cute.accumulators import Accumulator, Joined, converted, rows_of, zeros
from jax_core.kernels.cute.block_sparse import BlockSparse, make_block_sparse
from jax_core.kernels.cute.calls import Shaped, call
from jax_core.kernels.cute.settings import Settings
from jax_core.kernels.cute.tiles import TILES, BackwardTile, ForwardTile
from jax_core.masks.static import Mask
from jax_core.operands import is_placed

CONTINUES = False
Gradient = Array | Accumulator | Joined


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    """``out`` is in the query's dtype, whatever ``out_dtype``; a row that sees no key of the pair has LSE -inf and any output."""
    assert carry is None
    del out_dtype
    (q, k, v), listed = pair.shards, _listed(pair)
    tile = TILES[config.capability].forward(q.shape[3], v.shape[3], pair.diagonal and pair.scores.mask != Mask(), listed)
    launch = _make_launch(pair, tile, listed, padding=False)
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    lse = jax.ShapeDtypeStruct((heads, batch * length) if launch.packed else (batch, heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    inputs = [launch.rows(q, group), launch.rows(k), launch.rows(v), *launch.extras]
    results = [launch.rows(out, group), Shaped(lse, (*(1,) * (lse.ndim - 2), group, 1))]
    # Padding is of no document, and where no other pair is joined with this one its output is 0.
    zeroed = [_zeros(results.pop(0))] if launch.sequences and pair.padding and pair.alone else []
    out_rows, lse_rows = call("forward", launch.settings, inputs, zeroed, results)
    if launch.packed:
        lse_rows = jnp.swapaxes(lse_rows.reshape(heads, batch, length), 0, 1)
    if launch.queries is not None:
        lse_rows = jnp.where(launch.queries[:, None], lse_rows, -jnp.inf)
    return Partial(out_rows.reshape(out.shape), lse_rows)


def backward(pair: Pair, residuals: Residuals, dq: Any, config: KernelConfig[BwdParams]) -> Grads[Gradient]:
    """One sweep in any case."""
    q, k, v = pair.shards
    listed, group = _listed(pair), q.shape[2] // k.shape[2]
    tile = TILES[config.capability].backward(q.shape[3], v.shape[3], pair.scores.mask != Mask(), listed)
    launch, sequences = _make_launch(pair, tile, listed, padding=pair.padding), q.shape[0] if rectangles.packs(pair, listed) else 0
    if launch.by_document:
        return _by_document(pair, residuals, dq, launch, sequences, config.deterministic)
    accumulators = [zeros(q, "query", tile, sequences) if dq is None else dq]
    accumulators += _key_accumulators(k, v, tile, sequences, dq) if group > 1 else []
    grads = _differentiated(pair, residuals, launch, accumulators, config.deterministic)
    if group > 1:
        filled = [x.filled(values) for x, values in zip(accumulators, grads, strict=True)]
        return Grads(filled[0], filled[1], filled[2], None, None)
    dk, dv = (_covered(values.reshape(x.shape), launch.keys) for values, x in zip(grads[1:], (k, v), strict=True))
    return Grads(accumulators[0].filled(grads[0]), dk, dv, None, None)


def _by_document(
    pair: Pair, residuals: Residuals, dq: Any, launch: "_Launch", sequences: int, deterministic: bool
) -> Grads[Gradient]:
    """``sequences``: those of the sums of pairs other than the diagonal's. All is converted at once but for these."""
    (q, k, v), scale, alone = pair.shards, pair.scores.scale, pair.alone
    tile: Any = launch.settings.tile
    diagonal = zeros(q, "query", tile, launch.sequences) if launch.sequences else None
    first: Accumulator = dq.others if diagonal is None else diagonal
    keys = _key_accumulators(k, v, tile, launch.sequences or q.shape[0], first) if q.shape[2] > k.shape[2] else []
    grads = _differentiated(pair, residuals, launch, [first, *keys], deterministic)
    if keys:
        filled = [x.filled(values) for x, values in zip(keys, grads[1:], strict=True)]
        factors = zip(filled, (k, v), (scale, 1.0), strict=True)
        dk, dv = (converted(x, operand, factor, launch.where[2:]) for x, operand, factor in factors)
    else:
        dk, dv = (values.reshape(x.shape) for values, x in zip(grads[1:], (k, v), strict=True))
    if not alone:  # which are added to those of other pairs
        dk, dv = (_covered(x, launch.keys) for x in (dk, dv))
    total = first.filled(grads[0])
    if diagonal is None:
        return Grads(Joined(dq.local, total), dk, dv, None, None)
    dquery = converted(total, q, scale, launch.where[:2])
    if is_placed(pair.extras.documents) and not alone:  # each pair has tiles of its own
        rows = _covered(dquery, launch.queries)
        return Grads(rows if dq is None else dq + rows, dk, dv, None, None)
    others = None if alone else Joined(dquery, zeros(q, "query", tile, sequences, after=total))
    return Grads(dquery if others is None else others, dk, dv, None, None)


def _key_accumulators(k: Array, v: Array, tile: BackwardTile, sequences: int, after: Accumulator | None) -> list[Accumulator]:
    """Two equal arrays that a call changes would become one in XLA (``_locks``): dV's start from negative zeros."""
    return [zeros(x, "key", tile, sequences, after=after, zero=zero) for x, zero in ((k, 0.0), (v, -0.0))]


def _differentiated(
    pair: Pair, residuals: Residuals, launch: "_Launch", accumulators: list[Accumulator], deterministic: bool
) -> tuple[Array, ...]:
    """dQ, dK and dV as the program leaves them: in ``accumulators``, of queries alone or of all three."""
    q, k, v = pair.shards
    tile: Any = launch.settings.tile
    settings, group = replace(launch.settings, deterministic=deterministic), q.shape[2] // k.shape[2]
    statistics = [(residuals.lse / math.log(2), math.inf), (residuals.delta, 0)]
    inputs = [launch.rows(q, group), launch.rows(k), launch.rows(v), launch.rows(residuals.dout.astype(q.dtype), group)]
    inputs += [_statistics(x, fill, tile.tile_m, group, launch) for x, fill in statistics]
    in_place = _locks(q, k, tile, launch.sequences) if deterministic else []
    in_place += [x.shaped(launch.packed, group if x is accumulators[0] else 1) for x in accumulators]
    results = [] if len(accumulators) > 1 else [launch.rows(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)]
    return call("backward", settings, [*inputs, *launch.extras], in_place, results)[-3:]


def _zeros(result: Shaped) -> Shaped:
    return result._replace(array=jnp.zeros(result.array.shape, result.array.dtype))


def finish(
    operands: tuple[Array, Array, Array], grads: tuple[Gradient, Gradient, Gradient], scores: Scores
) -> tuple[Array, Array, Array]:
    """The sums over all pairs as gradients in their operands' dtype."""
    factors = scores.scale, scores.scale, 1.0
    dq, dk, dv = (_finished(x, operand, factor) for x, operand, factor in zip(grads, operands, factors, strict=True))
    return dq, dk, dv


def _finished(x: Gradient, operand: Array, factor: float) -> Array:
    if isinstance(x, Joined):
        total: Array = x.local.astype(jnp.float32) + converted(x.others, operand, factor).astype(jnp.float32)
        return total.astype(operand.dtype)
    return converted(x, operand, factor) if isinstance(x, Accumulator) else x.astype(operand.dtype)


class _Launch(NamedTuple):
    """How a pair of shards is computed. ``packed``: batch entries follow one another, and ``where`` says which rows are covered
    (``queries``, ``keys``: the same as bool ``[batch|1, length]``; None: all). ``sequences``: how many ``where`` has, if they are a
    rank's own documents; ``by_document``: whether it is cut by documents."""

    packed: bool
    where: rectangles.Offsets
    queries: Array | None
    keys: Array | None
    lists: BlockSparse | None
    settings: Settings
    sequences: int = 0
    by_document: bool = False

    def rows(self, x: Array | jax.ShapeDtypeStruct, group: int = 1) -> Shaped:
        """An operand or result ``[batch, length, heads, dim]``, of whose heads the program knows that ``group`` divides them."""
        return rows_of(x, group, self.packed)

    @property
    def extras(self) -> tuple:
        """The middle arguments of the programs."""
        where = tuple(None if x is None else Shaped(x, (1,)) for x in self.where)
        return where, *((None, None) if self.lists is None else (self.lists.blocks, self.lists.arrays))


def _make_launch(pair: Pair, tile: ForwardTile | BackwardTile, listed: bool, padding: bool) -> _Launch:
    """``padding``: whether a rank's own rows of no document are computed, too. (In a backward they give zeros.)"""
    (q, k, v), scores = pair.shards, pair.scores
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
        lists = make_block_sparse(pair, tile.tile_n, isinstance(tile, BackwardTile))
        return _Launch(False, rectangles.WHOLE, None, None, lists, replace(settings, listed=lists.listed))
    by_document = pair.extras.documents is not None
    if by_document and (pair.diagonal or pair.alone):
        bounds, where = rectangles.bounds_of(pair), rectangles.squares(pair, padding)
        covered = None if padding or not pair.padding else rectangles.between(bounds[:, :1], bounds[:, -1:], q.shape[1])
        return _Launch(True, where, covered, covered, None, _with_mask(settings, scores.mask), _sequences(where), by_document)
    if by_document and is_placed(pair.extras.documents):
        where, queries, keys = rectangles.of_shared_documents(pair)
        return _Launch(True, where, queries, keys, None, settings, _sequences(where), by_document)
    if rectangles.is_within(scores.mask):
        return _of_area(rectangles.within(pair), pair, _with_mask(settings, scores.mask))
    if not pair.diagonal and scores.mask.causal:
        area = rectangles.of_one_document(pair) if by_document else rectangles.rectangle(pair)
        return _of_area(area, pair, settings, by_document)
    settings = _with_mask(settings, scores.mask)
    if rectangles.packs(pair, listed):
        where = rectangles.offsets(q.shape[0], q.shape[1]), None, rectangles.offsets(k.shape[0], k.shape[1]), None
        return _Launch(True, where, None, None, None, settings)
    return _Launch(False, rectangles.WHOLE, None, None, None, settings)


def _sequences(where: rectangles.Offsets) -> int:
    """How many sequences of queries."""
    return 0 if where[0] is None else where[0].shape[0] - 1


def _of_area(area: rectangles.Rectangle, pair: Pair, settings: Settings, by_document: bool = False) -> _Launch:
    q_length, k_length = pair.q.shape[1], pair.k.shape[1]
    queries = rectangles.between(area.q_first, q_length if area.q_end is None else area.q_end, q_length)
    keys = rectangles.between(area.k_first, area.k_end, k_length)
    return _Launch(True, rectangles.where_of(area, pair), queries, keys, None, settings, by_document=by_document)


def _with_mask(settings: Settings, mask: Mask) -> Settings:
    """flash-attn-4 aligns masks to the last query and key, which are at the same position where there is a mask."""
    if mask.left is None and mask.right is None:
        return replace(settings, causal=mask.causal)
    return replace(settings, local=True, left=mask.left, right=0 if mask.causal else mask.right)


def _listed(pair: Pair) -> bool:
    if pair.extras.documents is not None:
        return False
    has_data = any(x is not None for x in (pair.extras.mask, pair.extras.q_segment_ids, pair.extras.q_position_ids))
    scattered, same_length = max(len(pair.q_runs), len(pair.k_runs)) > 2, pair.q.shape[1] == pair.k.shape[1]
    return rectangles.needs_lists(pair.scores, has_data, rectangles.is_static(pair.q_runs), same_length, scattered)


def _statistics(x: Array, fill: float, tile_m: int, group: int, launch: _Launch) -> Shaped:
    """``[batch, heads, length]`` as the backward reads it: rows in whole tiles, between packed batch entries a tile of padding."""
    batch, heads, length = x.shape
    if launch.sequences:
        offsets, lengths = launch.where[:2]
        assert offsets is not None
        rows, there = rectangles.in_tiles(offsets, jnp.diff(offsets) if lengths is None else lengths, batch * length, tile_m)
        x = jnp.where(there, jnp.swapaxes(x, 0, 1).reshape(heads, -1)[:, rows], fill)
        return Shaped(x, (group, tile_m))
    if launch.by_document and launch.queries is not None:  # a tile may reach into rows of another document
        x = jnp.where(launch.queries[:, None], x, fill)
    padding = -length % tile_m if batch == 1 or not launch.packed else tile_m
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)], constant_values=fill)
    if launch.packed:
        x = jnp.swapaxes(x, 0, 1).reshape(heads, -1)
    return Shaped(x, (*(1,) * (x.ndim - 2), group, tile_m))


def _locks(q: Array, k: Array, tile: BackwardTile, sequences: int = 0) -> list[Shaped]:
    """Zeros: one counter for each query block, and where heads share K/V two for each key block, dK's and dV's. ``sequences``: how
    many have blocks of their own, if these are not the batch entries.

    Those two are one array: of equal arrays XLA makes one, which a fusion of the call with slices of its operands (jax 0.11.1 and
    later) has once, and results that are aliased to it share its memory. With one counter for both every block waits for itself.
    """
    batch, length, heads, _ = q.shape
    batch = sequences or batch
    shapes = [(batch, heads, -(-length // tile.tile_m), 1)]
    if heads != k.shape[2]:
        shapes.append((batch, k.shape[2], -(-k.shape[1] // tile.tile_n), 2))
    return [Shaped(jnp.zeros(shape, jnp.int32), (1, 1, 1, shape[3])) for shape in shapes]


def _covered(gradient: Array, rows: Array | None) -> Array:
    """In float32, 0 in the rows that the call left as they were: all but these."""
    gradient = gradient.astype(jnp.float32)
    return gradient if rows is None else jnp.where(rows[:, :, None, None], gradient, 0)
