"""Stands in for jax-triton where there is no GPU: `triton_call` runs the kernel in Triton's interpreter, as a callback of XLA.

Needs TRITON_INTERPRET=1 before Triton is imported. The library's launch code is the same as on a GPU.
"""

from functools import partial
from threading import Lock
from typing import Any

import jax
import numpy as np
import torch

__version_info__ = (0, 3, 1)
_BETWEEN = 2**20  # bytes
_ONE_AT_A_TIME = Lock()  # the interpreter patches triton.language while it runs


def triton_call(*arrays, kernel, out_shape, grid, const, input_output_aliases, **ignored: Any):
    del ignored  # warps and stages have no meaning here
    run = partial(_interpret, kernel, const, grid, out_shape, {out: into for into, out in input_output_aliases.items()})
    axes = frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))
    arrays = tuple(_vary(array, axes) for array in arrays)
    results = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in out_shape]
    return jax.pure_callback(run, results, *arrays, vmap_method="sequential")


def _vary(array, axes):
    missing = tuple(axes - jax.typeof(array).mat.varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _interpret(kernel, const, grid, shapes, memory_of, *arrays):
    tensors = [_apart(np.asarray(array)) for array in arrays]
    # Whatever a kernel fails to write stays NaN.
    made = [
        tensors[memory_of[i]] if i in memory_of else _apart(np.full(shape.shape, _poison(shape.dtype), shape.dtype))
        for i, shape in enumerate(shapes)
    ]
    with _ONE_AT_A_TIME, np.errstate(invalid="ignore", over="ignore"):  # as on a GPU, where NaN and infinities raise no warning
        kernel[grid](*tensors, *made, const=const)
    return [tensor.numpy() for tensor in made]


def _apart(array):
    """The array with much between it and all others: what lies outside one is in none (kernel_bounds.py)."""
    wide = np.empty(array.nbytes + 2 * _BETWEEN, np.uint8)
    own = wide[_BETWEEN:-_BETWEEN].view(array.dtype).reshape(array.shape)
    own[...] = array
    return torch.from_numpy(own)


def _poison(dtype):
    return np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
