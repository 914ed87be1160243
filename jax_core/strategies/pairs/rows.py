"""Where a rank's rows are in the sequence, of which document they are, and which are none's: padding."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import Runs
from jax_core.masks.layout import runs
from jax_core.masks.placement import Pieces, pieces_of
from jax_core.operands import Operands, is_placed
from jax_core.strategies.contract import RingSpec


def rank_of(spec: RingSpec, operands: Operands) -> int | Array:
    """This device's rank: a number without a ring, else a value on the device."""
    if spec.problem.size == 1:
        return 0
    return lax.axis_index(spec.axis_name) if operands.rank is None else operands.rank[0]


def query_runs(spec: RingSpec, operands: Operands) -> Runs:
    return runs(spec.problem.layout, rank_of(spec, operands), spec.problem.size, operands.query.shape[1])


def as_kernel_takes_them(spec: RingSpec, operands: Operands) -> Operands:
    """With documents as segment ids, unless the kernel goes by documents."""
    if operands.documents is None or spec.by_document:
        return operands
    bare = operands._replace(documents=None)
    if is_placed(operands.documents):
        ids, distances = _pieces(spec, operands).ids(operands.query.shape[1])
        return bare._replace(q_segment_ids=ids, kv_segment_ids=ids, q_position_ids=distances, kv_position_ids=distances)
    ids = _numbers(operands.documents, _places(query_runs(spec, operands)))
    return bare._replace(q_segment_ids=ids, kv_segment_ids=ids)


def _pieces(spec: RingSpec, operands: Operands) -> Pieces:
    assert operands.documents is not None
    return pieces_of(operands.documents, rank_of(spec, operands))


class Real(NamedTuple):
    """bool ``[batch|1, length]``, True where a row of the queries, and of the keys, is no padding; None where all are."""

    queries: Array | None
    keys: Array | None


def real_rows(spec: RingSpec, operands: Operands) -> Real:
    """Of a rank's own shards."""
    if not spec.padding:
        return Real(None, None)
    if is_placed(operands.documents):
        within = jnp.arange(operands.query.shape[1]) < _pieces(spec, operands).ends[-1]
        return Real(within[None], within[None])
    if operands.documents is not None:
        places, table = _places(query_runs(spec, operands)), operands.documents
        within = (places >= table[:, :1]) & (places < table[:, -1:])
        return Real(within, within)
    sides = operands.q_segment_ids, operands.kv_segment_ids
    return Real(*(None if ids is None else jnp.atleast_2d(ids) >= 0 for ids in sides))


def _places(shard: Runs) -> Array:
    """int32 ``[length]``: those of a shard's rows in the whole sequence."""
    return jnp.concatenate([run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32) for run in shard])


def _numbers(documents: Array, places: Array) -> Array:
    """int32 ``[batch|1, length]``: of which document each place is, negative where of none."""
    find = partial(jnp.searchsorted, side="right", method="compare_all" if documents.shape[1] < 64 else "scan")
    numbers = jax.vmap(find, (0, None))(documents, places).astype(jnp.int32) - 1
    return jnp.where(places < documents[:, -1:], numbers, -1)
