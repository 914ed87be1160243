"""The forward kernel: online softmax over the key blocks on the list, after FlashAttention (Dao et al. 2022, arXiv:2205.14135)."""

from jax import Array
from jax.experimental import pallas as pl

from jax_core.kernels.tpu import softmax
from jax_core.kernels.tpu.plan import FIRST, LAST, Plan, visit, when_it_runs
from jax_core.kernels.tpu.products import column, product, row
from jax_core.kernels.tpu.scores import At, dropped, make_tile
from jax_core.kernels.tpu.softmax import SoftmaxState


def forward_kernel(plan: Plan, size: tuple[int, int], words, numbers, shards, beside, before, out, lse, *scratch):
    """``before``: the partial result so far, or None. ``size``: of the visits' list."""
    batch, head, number = (pl.program_id(axis) for axis in range(3))
    q, k, flags = visit(plan, size, words, batch, number)
    at, state = At(batch, head, q, k, numbers), SoftmaxState(*scratch)

    @pl.when(flags & FIRST != 0)
    def start():
        if before is None:
            softmax.start(state)
        else:
            softmax.resume(state, before[0], column(before[1][...]))

    def update(masked: bool) -> None:
        tile = make_tile(plan, at, shards.q[...], shards.k[...], beside, masked, turned=False)

        def weigh(weights: Array) -> Array:
            value = shards.v[...]
            return product(dropped(plan, tile, weights).astype(value.dtype), value, (1, 0), plan.scores)

        softmax.update(state, tile.logits, 1, weigh)

    when_it_runs(flags, update)

    @pl.when(flags & LAST != 0)
    def finish():
        softmax.finish(state, out, lse, as_stored=row)
