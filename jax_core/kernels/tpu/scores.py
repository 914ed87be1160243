"""What a score is, inside the Pallas kernels: a tile of queries x keys, or turned, of keys x queries.

A turned tile has its rows' statistics along the lanes, as the sweep for dK/dV wants them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_core.kernels.blocks import BlockLayout
from jax_core.kernels.blocks import distance as block_distance
from jax_core.kernels.tpu.plan import Beside, Plan, remainder
from jax_core.masks.dropout import threefry_2x32, threshold
from jax_core.masks.functions import Predicate
from jax_core.masks.static import visible


class At(NamedTuple):
    """Where a tile is: numbers of the batch entry, head, query block and key block here, and the array of `where_and_seed`."""

    batch: Any
    head: Any
    q: Any
    k: Any
    numbers: Any


class Tile(NamedTuple):
    """The logits, ``-inf`` where hidden; the soft cap's tanh or None; which weights dropout keeps or None; ``|q - k|`` or None."""

    logits: Any
    tanh: Any
    kept: Any
    distance: Any


def product(a, b, axes: tuple[int, int], plan: Plan):
    """A matrix product over one axis of each, in float32; float32 inputs are multiplied in full unless asked otherwise."""
    precision = plan.scores.precision
    if precision is None and a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def make_tile(plan: Plan, at: At, q, k, beside: Beside, masked: bool, turned: bool) -> Tile:
    scores = plan.scores
    x = product(k, q, (1, 1), plan) if turned else product(q, k, (1, 1), plan)
    if scores.logits_dtype is not None:
        x = x.astype(scores.logits_dtype).astype(jnp.float32)
    x, tanh, distance = x * scores.scale, None, None
    if scores.softcap is not None:
        tanh = jnp.tanh(x / scores.softcap)
        x = tanh * scores.softcap
    if beside.bias is not None:
        x = x + _turn(beside.bias[...].astype(jnp.float32), turned)
    places = _places(plan, at, x.shape, turned)
    positions = _positions(places, beside, turned)
    if beside.slopes is not None:
        distance = block_distance(scores.mask, positions[0], positions[1], jnp.float32)
        x = x - _slope(plan, at, beside) * distance
    if masked:
        x = jnp.where(_seen(plan, at, places, positions, beside, turned), x, -jnp.inf)
    return Tile(x, tanh, _kept(plan, at, places), distance)


def _slope(plan: Plan, at: At, beside: Beside):
    shared = beside.slopes.shape[1] == plan.heads
    return beside.slopes[0, at.head if shared else at.batch * plan.heads + at.head]


class _Places(NamedTuple):
    """Of a tile's queries and keys, each of the tile's shape: the place in the whole sequence, and for keys whether it is real."""

    q: Any
    k: Any
    real: Any


def _places(plan: Plan, at: At, shape, turned: bool) -> _Places:
    q, _ = _places_of(plan.q, at.q, at.numbers, 0, shape, 1 if turned else 0)
    k, real = _places_of(plan.k, at.k, at.numbers, 2, shape, 0 if turned else 1)
    return _Places(q, k, real)


def _places_of(where: BlockLayout, block, numbers, first: int, shape, axis: int):
    in_run = remainder(block, where.blocks_per_run) * where.block + lax.broadcasted_iota(jnp.int32, shape, axis)
    start = numbers[first] if where.runs == 1 else jnp.where(block < where.blocks_per_run, numbers[first], numbers[first + 1])
    return start + where.stride * in_run, None if where.even else in_run < where.length


def _positions(places: _Places, beside: Beside, turned: bool):
    if beside.q_positions is None:
        return places.q, places.k
    return sides(beside.q_positions, beside.k_positions, turned)


def sides(q_row, k_row, turned: bool):
    """Two rows of numbers so that they broadcast over a tile."""
    return (q_row[...], column(k_row[...])) if turned else (column(q_row[...]), k_row[...])


def column(row):
    """``[1, n] -> [n, 1]``"""
    return jnp.expand_dims(row[0], -1)


def _turn(x, turned: bool):
    if not turned:
        return x
    return column(x) if x.shape[0] == 1 else x.T


def _seen(plan: Plan, at: At, places: _Places, positions, beside: Beside, turned: bool):
    seen = visible(plan.scores.mask, *positions)
    if beside.q_segments is not None:
        q, k = sides(beside.q_segments, beside.k_segments, turned)
        seen = seen & (q == k) & (q >= 0)
    if places.real is not None:
        seen = seen & places.real
    if beside.mask is not None:
        seen = seen & (_turn(beside.mask[...].astype(jnp.int32), turned) != 0)
    for predicate in plan.inside:
        seen = seen & _evaluate(predicate, at, places, positions)
    return seen


def _evaluate(predicate: Predicate, at: At, places: _Places, positions):
    assert predicate.elementwise is not None
    q, k = positions if predicate.over == "position" else (places.q, places.k)
    q, k = (jnp.broadcast_to(x, places.q.shape) for x in (q, k))
    return predicate.elementwise(at.numbers[4] + at.batch, at.numbers[5] + at.head, q, k)


def _kept(plan: Plan, at: At, places: _Places):
    """As ``dropout.keep_mask``; compared as signed numbers, which is what the hardware does."""
    if not plan.scores.dropout_prob:
        return None
    words = [lax.bitcast_convert_type(x, jnp.uint32) for x in (at.numbers[6], at.numbers[7])]
    key = threefry_2x32(tuple(words), (at.numbers[4] + at.batch, at.numbers[5] + at.head))
    bits, _ = threefry_2x32(key, (places.q, places.k))
    limit = jnp.uint32(threshold(plan.scores.dropout_prob))
    signed = (lax.bitcast_convert_type(x ^ jnp.uint32(1 << 31), jnp.int32) for x in (bits, limit))
    low, high = signed
    return low >= high


def dropped(plan: Plan, tile: Tile, x):
    """``x`` where a weight is kept, scaled so that the sum's expectation stays."""
    return x if tile.kept is None else jnp.where(tile.kept, x * (1 / (1 - plan.scores.dropout_prob)), 0.0)


def logit_gradient(plan: Plan, tile: Tile, weights, dweights, delta):
    """Of the logits, and of the products of queries and keys."""
    dlogits = weights * (dropped(plan, tile, dweights) - delta)
    dproducts = dlogits * plan.scores.scale
    return dlogits, dproducts if tile.tanh is None else dproducts * (1 - tile.tanh * tile.tanh)
