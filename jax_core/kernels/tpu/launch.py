"""Launches a Pallas kernel: what all launches have in common."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu import params
from jax_core.varying import vary, varying_axes


def launch(
    kernel: Callable[..., None],
    prefetched: Sequence[Array],
    inputs: Sequence[object],  # pytrees of arrays
    in_specs: Sequence[object],  # and of their BlockSpecs
    outputs: Sequence[jax.ShapeDtypeStruct | None],
    out_specs: Sequence[pl.BlockSpec | None],
    *,
    grid: tuple[int | Array, ...],
    scratch: Sequence[pl.MemoryRef],
    aliases: dict[int, int],
    cost: pl.CostEstimate,
    generation: str,
    all_in_blocks: bool = True,
) -> tuple[Array, ...]:
    """Runs ``kernel(*prefetched, *inputs, *outputs, *scratch)`` over ``grid``. ``aliases``: from leaves of ``inputs`` to the
    outputs that reuse their buffers; an output may be None. ``all_in_blocks``: whether every array is in blocks; ``vmap`` has no
    rule for others."""
    prefetched, inputs = vary((tuple(prefetched), tuple(inputs)), varying_axes(prefetched, inputs))
    axis_type = jax.typeof(prefetched[0]).mat
    settings = dict(
        out_shape=[x and jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axis_type) for x in outputs],
        input_output_aliases={len(prefetched) + leaf: output for leaf, output in aliases.items()},
        compiler_params=pltpu.CompilerParams(
            # Batch entries and heads are independent; the visits of each run in order.
            dimension_semantics=tuple("parallel" if axis < 2 else "arbitrary" for axis in range(len(grid))),
            vmem_limit_bytes=params.generation(generation).memory,
        ),
        cost_estimate=cost,
        name=_name(kernel),
    )  # type: dict[str, Any]
    specs = dict(in_specs=list(in_specs), out_specs=list(out_specs), scratch_shapes=scratch)  # type: dict[str, Any]

    traced = [size for size in grid if not isinstance(size, int)]

    # ``traced`` is an argument: values that vmap maps over must not be closed over.
    def call(traced: Sequence[Array], *arrays: Any) -> tuple[Array, ...]:
        sizes = iter(traced)
        whole = tuple(size if isinstance(size, int) else next(sizes) for size in grid)
        grid_spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(prefetched), grid=whole, **specs)
        return tuple(pl.pallas_call(kernel, grid_spec=grid_spec, **settings)(*arrays))

    return (call if all_in_blocks else jax.custom_batching.sequential_vmap(call))(traced, *prefetched, *inputs)


def _name(kernel: Callable[..., None]) -> str:
    return _name(kernel.func) if isinstance(kernel, partial) else kernel.__name__
