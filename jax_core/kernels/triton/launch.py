"""Launches a Triton kernel from JAX, through jax-triton 0.3 or 0.4."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import jax
from jax import Array

from jax_core.kernels.contract import KernelConfig, no_gpu
from jax_core.kernels.triton.disk_cache import keep
from jax_core.varying import vary, varying_axes


def launch(
    kernel: Callable,
    inputs: Sequence[Array | None],
    in_place: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    const: object,
    grid: tuple[int, ...],
    config: KernelConfig,
) -> tuple[Array, ...]:
    """Runs ``kernel(*inputs, *in_place, *in_place again, *outputs, const)`` over ``grid``.

    ``inputs``: None for one that the kernel does not read. The results are the arrays of ``in_place`` as the kernel left them, in
    the same memory unless XLA still needs the old contents, then ``outputs`` (given as ``ShapeDtypeStruct``).
    """
    given = [array for array in (*inputs, *in_place) if array is not None]
    inputs = [given[0] if array is None else array for array in inputs]  # a placeholder that no kernel reads
    types = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place), *outputs]
    aliases = {len(inputs) + i: i for i in range(len(in_place))}
    settings: dict[str, object] = dict(kernel=kernel, grid=grid, const=const, compute_capability=config.capability)
    settings |= dict(num_warps=config.params.num_warps, num_stages=config.params.num_stages)
    # jax-triton has no rule for vmap: entries are computed one after another.
    call = jax.custom_batching.sequential_vmap(lambda *arrays: tuple(_call(arrays, types, aliases, settings)))
    results = call(*inputs, *in_place)
    return vary(tuple(results), varying_axes(given))  # jax-triton's results carry no varying axes


def _call(
    arrays: Sequence[Array], types: Sequence[jax.ShapeDtypeStruct], aliases: dict[int, int], settings: dict[str, object]
) -> Sequence[Array]:
    library = jax_triton()
    settings = settings | dict(input_output_aliases=aliases)
    if library.__version_info__ < (0, 4):
        return library.triton_call(*arrays, out_shape=types, enable_fp_fusion=True, **settings)
    again = [None] * len(aliases)  # 0.4 passes an aliased pair as one pointer
    # The replacement for aliases, Ref arguments, loses the types of shard_map in a loop. The filter stays: to put back what was
    # there would undo what other threads have set since.
    warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
    return library.triton_call(*arrays, *again, out_type=types, backend_options={"enable_fp_fusion": True}, **settings)


def missing(backend: str, capability: int) -> str | None:
    """Why no Triton kernel can run there, in words, or None."""
    if reason := no_gpu(backend, capability):
        return f"the Triton kernels need an NVIDIA GPU, and {reason}"
    try:
        jax_triton()
    except ImportError as error:
        return (
            f"the Triton kernels need jax-triton >= 0.3.1, which cannot be imported ({error}); pip install '.[gpu]' in a checkout"
        )
    return None if capability >= 80 else f"the Triton kernels need compute capability 8.0, this GPU has {capability / 10}"


def jax_triton() -> ModuleType:
    """Imported late: it needs a jaxlib for GPUs."""
    with _restoring("TRITON_CACHE_DIR"):
        import jax_triton
    keep(jax_triton)
    return jax_triton


@contextmanager
def _restoring(name: str) -> Iterator[None]:
    """Restores the environment variable afterwards: jax-triton changes Triton's cache folder for the whole process, which would
    break the cache of ``torch.compile``."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
