"""Which block of each array is in VMEM at a visit."""

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu.constants import BlockedExtras, Shards, TileConstants, quotient

Place = tuple[Array, Array, Array, Array]  # a visit's batch entry, head, query block, key block


@dataclass(frozen=True)
class Specs:
    """``place(*grid indices, *prefetched)`` gives the place of a visit."""

    const: TileConstants
    place: Callable[..., Place]

    def _spec(self, shape: tuple[int | None, ...], index: Callable[[Array, Array, Array, Array], tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *at: index(*self.place(*at)))

    def query(self, dim: int) -> pl.BlockSpec:
        return self._spec((None, None, self.const.q.block, dim), lambda b, h, i, j: (b, h, i, 0))

    def key(self, dim: int) -> pl.BlockSpec:
        group = self.const.group
        return self._spec((None, None, self.const.k.block, dim), lambda b, h, i, j: (b, quotient(h, group), j, 0))

    def query_statistics(self) -> pl.BlockSpec:
        """For arrays ``[batch, heads, 1, length]``."""
        return self._spec((None, None, 1, self.const.q.block), lambda b, h, i, j: (b, h, 0, i))

    def shards(self, backward: bool = False) -> Shards[pl.BlockSpec]:
        dim, value_dim = self.const.dim, self.const.value_dim
        qkv = self.query(dim), self.key(dim), self.key(value_dim)
        return Shards(*qkv, self.query(value_dim), self.query_statistics(), self.query_statistics()) if backward else Shards(*qkv)

    def extras(self, arrays: BlockedExtras[Array]) -> BlockedExtras[pl.BlockSpec]:
        return BlockedExtras(
            self._ids(arrays.q_segments, of_keys=False),
            self._ids(arrays.k_segments, of_keys=True),
            self._ids(arrays.q_positions, of_keys=False),
            self._ids(arrays.k_positions, of_keys=True),
            self.tile(arrays.bias),
            self.tile(arrays.mask),
            None if arrays.slopes is None else pl.BlockSpec(memory_space=pltpu.SMEM),
        )

    def slopes(self) -> pl.BlockSpec:
        """For the slopes' gradients, ``[batch, kv_heads, key blocks, group, q]``."""
        group, block = self.const.group, self.const.q.block
        return self._spec((None, None, None, group, block), lambda b, h, i, j: (b, quotient(h, group), j, 0, 0))

    def _ids(self, array: Array | None, of_keys: bool) -> pl.BlockSpec | None:
        if array is None:
            return None
        shared, block = array.shape[0] == 1, (self.const.k if of_keys else self.const.q).block
        return self._spec((None, 1, block), lambda b, h, i, j: (0 if shared else b, 0, j if of_keys else i))

    def tile(self, array: Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        batch, heads, rows = (array.shape[axis] > 1 for axis in range(3))
        return self._spec(
            (None, None, self.const.q.block if rows else 1, self.const.k.block),
            lambda b, h, i, j: (b if batch else 0, h if heads else 0, i if rows else 0, j),
        )
