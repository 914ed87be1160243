"""The forward kernel: online softmax over the listed key blocks, after FlashAttention (Dao et al. 2022, arXiv:2205.14135)."""

from jax import Array, Ref
from jax.experimental import pallas as pl

from jax_core.kernels.tpu import softmax
from jax_core.kernels.tpu.constants import BlockedExtras, Shards, TileConstants
from jax_core.kernels.tpu.schedule import FIRST, LAST, update_if_visible, visit
from jax_core.kernels.tpu.scores import TileIndex, column, dropped, make_tile, product, row
from jax_core.kernels.tpu.softmax import SoftmaxState


def forward_kernel(
    const: TileConstants,
    size: tuple[int, int],
    words: Ref,
    scalars: Ref,
    shards: Shards[Ref],
    blocked: BlockedExtras[Ref],
    before: tuple[Ref, Ref] | None,
    out: Ref,
    lse: Ref,
    *scratch: Ref,
) -> None:
    """``before``: ``out`` and ``lse`` of the partial result so far, or None. ``size``: of the lists of visits."""
    batch, head, number = (pl.program_id(axis) for axis in range(3))
    q, k, flags = visit(const, size, words, batch, number)
    at, state = TileIndex(batch, head, q, k, scalars), SoftmaxState(*scratch)

    @pl.when(flags & FIRST != 0)
    def start() -> None:
        if before is None:
            softmax.start(state)
        else:
            softmax.resume(state, before[0], column(before[1][...]))

    def update(masked: bool) -> None:
        tile = make_tile(const, at, shards.q[...], shards.k[...], blocked, masked, transposed=False)

        def weigh(weights: Array) -> Array:
            value = shards.v[...]
            return product(dropped(const, tile, weights).astype(value.dtype), value, (1, 0), const.scores)

        softmax.update(state, tile.logits, 1, weigh)

    update_if_visible(flags, update)

    @pl.when(flags & LAST != 0)
    def finish() -> None:
        softmax.finish(state, out, lse, as_stored=row)
