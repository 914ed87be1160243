"""Calling a fused kernel, and its inner pipelines from HBM to VMEM: operands by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.plan import TRAVELLING, Plan
from jax_core.varying import vary, varying_axes

# Which of XLA's barrier semaphores the kernels meet at: one for all, as no two calls mix there (rotation.py).
_COLLECTIVE_ID = 0
_VMEM_LIMIT = 32 * 2**20  # of the 64 MiB (v7x) to 128 MiB of a core; by default a kernel may use 16
_ANY = pl.BlockSpec(memory_space=pl.ANY)


def launch(
    kernel: Callable, plan: Plan, rank, given: dict[str, Any], results: dict[str, Any], scratch, *, products: int, interpret: bool
) -> dict[str, Any]:
    """``kernel(rank, refs)`` once, on references by name into HBM (``given``, ``results``) and to ``scratch``. Of ``given``, what
    travels is written too, in its own buffers. ``products``: matrix products a tile."""
    arrays = {name: array for name, array in given.items() if array is not None}
    fixed = [name for name in arrays if name not in TRAVELLING]
    moving = [name for name in arrays if name in TRAVELLING]
    # What neighbours send into is in HBM: left alone, XLA puts small results into VMEM.
    pinned = [pltpu.HBM(x.shape, x.dtype) for x in (*(arrays[name] for name in moving), *results.values())]

    def body(rank_ref, *refs):
        inputs, outputs = refs[: len(fixed)], refs[len(arrays) :]  # of what is written in place, the outputs
        refs = dict(zip((*fixed, *moving, *results, *scratch), (*inputs, *outputs), strict=True))
        with _as_on_a_tpu() if interpret else nullcontext():
            kernel(rank_ref[0], refs)

    call = pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] + [_ANY] * len(arrays),
        out_specs=[_ANY] * (len(moving) + len(results)),
        out_shape=pinned,
        scratch_shapes=list(scratch.values()),
        input_output_aliases={1 + len(fixed) + i: i for i in range(len(moving))},
        compiler_params=pltpu.CompilerParams(collective_id=_COLLECTIVE_ID, has_side_effects=True, vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(plan, products, [*arrays.values(), *results.values()]),
        interpret=pltpu.InterpretParams() if interpret else False,
    )
    # Under vmap entries come one after another: all ranks must be in the same call of the kernel.
    found = jax.custom_batching.sequential_vmap(lambda *operands: tuple(call(*operands)))(
        jnp.reshape(rank, (1,)), *(arrays[name] for name in (*fixed, *moving))
    )
    found = vary(found[len(moving) :], varying_axes(rank, arrays))  # pinned results are not typed
    return dict(zip(results, found, strict=True))


@contextmanager
def _as_on_a_tpu() -> Iterator[None]:
    """JAX's inner pipelines ask what TPU they are for, also where they are interpreted: there a CPU passes for one."""
    from jax._src.pallas.mosaic import tpu_info  # no public way to say it

    with patch.dict(tpu_info.registry, cpu=lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)):
        yield


def _cost(plan: Plan, products: int, arrays) -> pl.CostEstimate:
    """Of unmasked attention, for XLA's scheduler."""
    pairs = plan.batch * plan.heads * plan.q.length * plan.k.length * (plan.hops + 1)
    moved = sum(x.size * x.dtype.itemsize for x in arrays) * (plan.hops + 1)
    return pl.CostEstimate(flops=products * 2 * pairs * plan.dim, transcendentals=pairs, bytes_accessed=moved)


def pipeline(kernel: Callable, grid: tuple[int, ...], inputs: dict[str, Any], carry: dict[str, Any], refs: dict[str, Any]) -> None:
    """``kernel(blocks, before, after)`` over ``grid``, on blocks in VMEM of the references that there are: of ``inputs`` to read,
    of ``carry`` as they were and to write anew."""
    inputs = {name: spec for name, spec in inputs.items() if name in refs}

    def body(*blocks):
        read, rest = blocks[: len(inputs)], blocks[len(inputs) :]
        before, after = rest[: len(carry)], rest[len(carry) :]
        kernel(*(dict(zip(names, part, strict=True)) for names, part in ((inputs, read), (carry, before), (carry, after))))

    whole = [refs[name] for name in (*inputs, *carry, *carry)]
    pltpu.emit_pipeline(body, grid=grid, in_specs=[*inputs.values(), *carry.values()], out_specs=[*carry.values()])(*whole)
