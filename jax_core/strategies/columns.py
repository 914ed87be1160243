"""The columns of a bias or mask that belong to one shard of keys. Columns are in sequence order."""

import jax.numpy as jnp
from jax import lax

from jax_core.masks.layout import Run


def take_columns(x, runs: tuple[Run, ...]):
    """``[..., keys of the whole sequence] -> [..., keys of the shard]``"""
    return jnp.concatenate([_take(x, run) for run in runs], axis=-1)


def put_columns(x, columns, runs: tuple[Run, ...]):
    """``x`` with the shard's columns replaced: the transpose of :func:`take_columns` if every shard is put once."""
    start = 0
    for run in runs:
        x, start = _put(x, columns[..., start : start + run.length], run), start + run.length
    return x


def _take(x, run: Run):
    if run.stride == 1:
        return lax.dynamic_slice_in_dim(x, run.start, run.length, axis=-1)
    return lax.dynamic_index_in_dim(_strided(x, run), run.start, axis=-1, keepdims=False)


def _put(x, columns, run: Run):
    if run.stride == 1:
        return lax.dynamic_update_slice_in_dim(x, columns, run.start, axis=-1)
    return lax.dynamic_update_index_in_dim(_strided(x, run), columns, run.start, axis=-1).reshape(x.shape)


def _strided(x, run: Run):
    """A striped run takes every ``stride``-th column, starting below the stride: one column of this view."""
    return x.reshape(*x.shape[:-1], run.length, run.stride)
