"""The columns of a bias or mask that belong to one shard of keys. Columns are in sequence order."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.blocks import index
from jax_core.kernels.contract import Runs
from jax_core.masks.layout import Run

_SLICES = 2  # one for each run; from more runs the columns are gathered by their index
_UNIQUE: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


def take_slice(x: Array, runs: Runs) -> Array:
    """``[..., keys of the whole sequence] -> [..., keys of the shard]``"""
    if len(runs) > _SLICES:
        return jnp.asarray(x).at[..., index(runs)].get(**_UNIQUE)
    return jnp.concatenate([_take(x, run) for run in runs], axis=-1)


def put_slice(x: Array, columns: Any, runs: Runs) -> Array:
    """``x`` with the shard's columns replaced: the transpose of :func:`take_slice` if every shard is put once."""
    if len(runs) > _SLICES:
        return x.at[..., index(runs)].set(columns, **_UNIQUE)
    start = 0
    for run in runs:
        x, start = _put(x, columns[..., start : start + run.length], run), start + run.length
    return x


def _take(x: Array, run: Run) -> Array:
    if run.stride == 1:
        return lax.dynamic_slice_in_dim(x, run.start, run.length, axis=-1)
    return lax.dynamic_index_in_dim(_strided(x, run), run.start, axis=-1, keepdims=False)


def _put(x: Array, columns: Array, run: Run) -> Array:
    if run.stride == 1:
        return lax.dynamic_update_slice_in_dim(x, columns, run.start, axis=-1)
    return lax.dynamic_update_index_in_dim(_strided(x, run), columns, run.start, axis=-1).reshape(x.shape)


def _strided(x: Array, run: Run) -> Array:
    """A striped run takes every ``stride``-th column, starting below the stride: one column of this view."""
    return x.reshape(*x.shape[:-1], run.length, run.stride)
