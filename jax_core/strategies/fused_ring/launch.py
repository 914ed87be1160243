"""Launches a fused kernel, and its inner pipelines from HBM to VMEM, with operands by name."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.constants import ROTATING, Refs, RingConstants
from jax_core.varying import vary, varying_axes

# The id of XLA's barrier semaphore: all calls can share it, since no two calls mix at the barrier (rotation.py).
_COLLECTIVE_ID = 0
_VMEM_LIMIT = 32 * 2**20  # of the 64 MiB (v7x) to 128 MiB of a core; by default a kernel may use 16
_ANY = pl.BlockSpec(memory_space=pl.ANY)


def launch(
    kernel: Callable[[Array, Refs], None],
    const: RingConstants,
    rank: Array,
    inputs: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, pl.MemoryRef],
    *,
    products: int,
) -> dict[str, Array]:
    """Calls ``kernel(rank, refs)``; ``refs`` holds, by name, references into HBM (``inputs``, ``results``) and to ``scratch``. Of
    ``inputs``, the rotating arrays are also written, in their own buffers. ``products``: matrix products per tile."""
    arrays = {name: array for name, array in inputs.items() if array is not None}
    fixed = [name for name in arrays if name not in ROTATING]
    moving = [name for name in arrays if name in ROTATING]
    # What neighbours write into must be in HBM: XLA would put small results into VMEM.
    written: list[Array | jax.ShapeDtypeStruct] = [*(arrays[name] for name in moving), *results.values()]
    pinned = [pltpu.HBM(x.shape, x.dtype) for x in written]

    def body(rank_ref: Ref, *refs: Ref) -> None:
        inputs, outputs = refs[: len(fixed)], refs[len(arrays) :]  # of arrays written in place, the outputs
        refs = dict(zip((*fixed, *moving, *results, *scratch), (*inputs, *outputs), strict=True))
        kernel(rank_ref[0], refs)

    call = pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] + [_ANY] * len(arrays),
        out_specs=[_ANY] * (len(moving) + len(results)),
        out_shape=pinned,
        scratch_shapes=list(scratch.values()),
        input_output_aliases={1 + len(fixed) + i: i for i in range(len(moving))},
        compiler_params=pltpu.CompilerParams(collective_id=_COLLECTIVE_ID, has_side_effects=True, vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(const, products, [*arrays.values(), *results.values()]),
    )
    # Under vmap, one entry after another: all ranks must be in the same call of the kernel.
    computed = jax.custom_batching.sequential_vmap(lambda *operands: tuple(call(*operands)))(
        jnp.reshape(rank, (1,)), *(arrays[name] for name in (*fixed, *moving))
    )
    computed = vary(computed[len(moving) :], varying_axes(rank, arrays))  # pinned results carry no varying axes
    return dict(zip(results, computed, strict=True))


def _cost(const: RingConstants, products: int, arrays: Sequence[Array | jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """The cost of unmasked attention, for XLA's scheduler."""
    pairs = const.batch * const.heads * const.q.length * const.k.length * (const.hops + 1)
    moved = sum(x.size * x.dtype.itemsize for x in arrays) * (const.hops + 1)
    return pl.CostEstimate(flops=products * 2 * pairs * const.dim, transcendentals=pairs, bytes_accessed=moved)


def pipeline(
    kernel: Callable, grid: tuple[int, ...], inputs: dict[str, pl.BlockSpec], carry: dict[str, pl.BlockSpec], refs: Refs
) -> None:
    """Runs ``kernel(blocks, before, after)`` over ``grid``, on blocks in VMEM of the references in ``refs``: ``blocks`` of
    ``inputs`` (those that ``refs`` has), and of ``carry`` both the old contents (``before``) and the new (``after``)."""
    inputs = {name: spec for name, spec in inputs.items() if name in refs}

    def body(*blocks: Ref) -> None:
        read, rest = blocks[: len(inputs)], blocks[len(inputs) :]
        before, after = rest[: len(carry)], rest[len(carry) :]
        kernel(*(dict(zip(names, part, strict=True)) for names, part in ((inputs, read), (carry, before), (carry, after))))

    whole = [refs[name] for name in (*inputs, *carry, *carry)]
    pltpu.emit_pipeline(body, grid=grid, in_specs=[*inputs.values(), *carry.values()], out_specs=[*carry.values()])(*whole)
