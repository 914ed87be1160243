"""Masks that flash-attn-4's own causal mask and windows do not express: lists of the blocks to visit, and the arrays from which a
program judges pair by pair in those that are partly visible."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_core.kernels.blocks import (
    WORD,
    BlockLayout,
    block_layout,
    block_sparsity,
    dense_mask,
    index,
    mask_in_blocks,
    packed_bits,
    same_rows,
)
from jax_core.kernels.contract import Pair, Runs
from jax_core.kernels.cute.calls import Shaped
from jax_core.kernels.cute.settings import Listed
from jax_core.masks.static import Mask

QUERY_BLOCK = 128  # of the lists; the kernels' own query tiles divide it


class BlockSparse(NamedTuple):
    """``blocks``: counts and lists of the partly, then of the fully visible blocks; ``arrays``: what ``listed`` names."""

    blocks: tuple[Shaped, ...]
    arrays: tuple[Shaped, ...]
    listed: Listed


def make_block_sparse(pair: Pair, key_block: int, of_queries: bool) -> BlockSparse:
    """``of_queries``: lists of query blocks, one for each key block, else of key blocks, one for each query block."""
    q, k = block_layout(pair.q_runs, QUERY_BLOCK), block_layout(pair.k_runs, key_block)
    visible, whole = (table[:, None] for table in block_sparsity(q, k, pair))
    seen = dense_mask(pair, pair.predicates)
    if seen is not None:
        tiles = _tiles(seen, q, k)
        # One list for all heads: a block that some head sees is visited, and looked at closely unless all see all of it.
        visible = visible & tiles.any((3, 5)).any(1, keepdims=True)
        whole = whole & tiles.all((3, 5)).all(1, keepdims=True)
    visible, whole = (jnp.swapaxes(x, 2, 3)[:, 0] if of_queries else x[:, 0] for x in (visible, whole))
    arrays, mask = _arrays(pair, seen), pair.scores.mask
    listed = Listed(
        mask=mask,
        static=mask != Mask(any_position=mask.any_position),
        arrays=tuple(arrays),
        list_batch=1 if visible.shape[0] == 1 else 0,
        segment_batch=_rows(arrays, "q_segments"),
        position_batch=_rows(arrays, "q_positions"),
        bits_batch=_rows(arrays, "bits"),
        bits_heads=_rows(arrays, "bits", 1),
    )
    blocks = (*_ordered(visible & ~whole), *_ordered(whole))
    return BlockSparse(tuple(map(_shaped, blocks)), tuple(map(_shaped, arrays.values())), listed)


def _ordered(chosen: Array) -> tuple[Array, Array]:
    """``[batch, rows, columns]`` -> how many columns of each row are chosen, and which, these first."""
    columns = chosen.shape[-1]
    which = jnp.where(chosen, 0, columns) + jnp.arange(columns, dtype=jnp.int32)
    return chosen.sum(-1, dtype=jnp.int32), jnp.sort(which, axis=-1) % columns


def _arrays(pair: Pair, seen: Array | None) -> dict[str, Array]:
    q_runs, k_runs, extras = pair.q_runs, pair.k_runs, pair.extras
    arrays = {"starts": jnp.stack([_start(q_runs), _start(k_runs)])}
    positions = extras.q_position_ids, extras.kv_position_ids
    if positions[0] is None and max(len(q_runs), len(k_runs)) > 2:
        positions = index(q_runs)[None], index(k_runs)[None]
    for name, ids in (("segments", (extras.q_segment_ids, extras.kv_segment_ids)), ("positions", positions)):
        q_ids, k_ids = same_rows(*ids)
        if q_ids is not None and k_ids is not None:
            arrays |= {f"q_{name}": q_ids, f"k_{name}": k_ids}
    return arrays if seen is None else arrays | {"bits": _bits(seen, q_runs)}


def _start(runs: Runs) -> Array:
    """int32 ``[4]``: the first positions of the two runs, their length, their stride. (Of more runs the positions are an array.)"""
    numbers = [runs[0].start, runs[-1].start, runs[0].length, runs[0].stride]
    return jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])


def _tiles(seen: Array, q: BlockLayout, k: BlockLayout) -> Array:
    """``[batch|1, heads|1, query blocks, block, key blocks, block]``, padding hidden."""
    seen = mask_in_blocks(seen, q, k)
    return seen.reshape(*seen.shape[:2], q.blocks, q.block, k.blocks, k.block)


def _bits(seen: Array, q_runs: Runs) -> Array:
    """int32 ``[batch|1, heads|1, query rows, key rows / 32]``."""
    rows = sum(run.length for run in q_runs)
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], rows, seen.shape[3]))
    return packed_bits(jnp.pad(seen, [(0, 0)] * 3 + [(0, -seen.shape[3] % WORD)]))


def _rows(arrays: dict[str, Array], name: str, axis: int = 0) -> int:
    """1 if shared; otherwise the program takes a row for each entry, however many there are."""
    return 1 if name not in arrays or arrays[name].shape[axis] == 1 else 0


def _shaped(array: Array) -> Shaped:
    return Shaped(array, (1,) * array.ndim)
