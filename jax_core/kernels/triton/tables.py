"""What the kernels need for data-dependent masks: packed bits, and for every block the list of blocks that it has to visit.

Computed before a launch. Only a call with segment ids, position ids, a boolean mask, a mask function, or more than two runs to a
shard needs them; otherwise the kernel works out its blocks itself.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.config import FwdParams
from jax_core.kernels.blocks import WORD, block_layout, block_sparsity, dense_mask, mask_in_blocks, packed_bits
from jax_core.kernels.contract import KernelConfig, Pair
from jax_core.kernels.triton import launch
from jax_core.kernels.triton.constants import OfTables


class Tables(NamedTuple):
    """``bits``: int32 ``[batch|1, heads|1, query rows, key rows / 32]``, rows counted in whole blocks, or None. ``visible``,
    ``whole``: ``[batch|1, heads|1, query blocks, key blocks]``, which pairs of blocks have a visible pair, and which are fully
    visible; or None if the kernel works them out."""

    bits: Array | None
    visible: Array | None
    whole: Array | None

    @property
    def settings(self) -> OfTables:
        """The launch constants that a table decides."""
        bits = (0, 0) if self.bits is None else self.bits.shape[:2]
        table = (1, 1) if self.visible is None else self.visible.shape[:2]
        return dict(
            bits_batch=bits[0],
            bits_heads=bits[1],
            table=self.visible is not None,
            table_batch=table[0],
            table_heads=table[1],
        )

    def lists(self, of_keys: bool, config: KernelConfig) -> tuple[Array | None, Array | None]:
        """``(order, counts)``: for each block the blocks of the other side to visit, first the fully visible ones (its first
        count), then the partly visible ones (its second count)."""
        if self.visible is None or self.whole is None:
            return None, None
        visible, whole = (x if of_keys else jnp.swapaxes(x, -1, -2) for x in (self.visible, self.whole))
        return list_blocks(jnp.where(visible, jnp.where(whole, 0, 1), 2).astype(jnp.int32), config)


@dataclass(frozen=True)
class ListsConstants:
    """What ``lists_kernel`` is compiled for."""

    columns: int
    block: int


def list_blocks(kinds: Array, config: KernelConfig) -> tuple[Array, Array]:
    """``kinds [..., rows, columns]`` of pairs of blocks -> ``order [..., rows, columns + 1]``, ``counts [..., rows, 2]``
    (``lists_kernel``)."""
    from jax_core.kernels.triton.lists_kernel import lists_kernel

    *rows, columns = kinds.shape
    const = ListsConstants(columns, min(1024, 1 << (columns - 1).bit_length()))
    results = [jax.ShapeDtypeStruct((*rows, length), jnp.int32) for length in (columns + 1, 2)]
    config = replace(config, params=FwdParams(num_stages=1, num_warps=4))
    order, counts = launch.launch(lists_kernel, [kinds], [], results, const=const, grid=(math.prod(rows),), config=config)
    return order, counts


def make_tables(pair: Pair, blocks: tuple[int, int]) -> Tables:
    """``blocks``: the block sizes of queries and keys."""
    data = pair.extras.q_segment_ids, pair.extras.q_position_ids, pair.extras.mask
    if all(x is None for x in data) and not pair.scores.predicates and max(len(pair.q_runs), len(pair.k_runs)) <= 2:
        return Tables(None, None, None)
    q, k = block_layout(pair.q_runs, blocks[0]), block_layout(pair.k_runs, blocks[1])
    visible, whole = (table[:, None] for table in block_sparsity(q, k, pair))
    seen = dense_mask(pair, pair.predicates)
    if seen is None:
        return Tables(None, visible, whole)
    bits = packed_bits(mask_in_blocks(seen, q, k))
    tiles = bits.reshape(*bits.shape[:2], q.blocks, q.block, k.blocks, k.block // WORD)
    return Tables(bits, visible & (tiles != 0).any((3, 5)), whole & (tiles == -1).all((3, 5)))
