"""The rounding errors of jax_core.ring_attention on rings of 1 to 8 CPU devices: the tables of benchmarks/cpu/numerics.md.

python -m benchmarks.cpu.numerics
"""

import os
import platform
from collections.abc import Callable, Iterator
from itertools import product

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_core import ring_attention
from jax_core.masks.layout import LAYOUTS, inverse_permutation, permutation
from jax_core.testing.oracle import reference_attention

LENGTH, HEADS, KV_HEADS, DIM = 1024, 4, 2, 64
DTYPES = ("float32", "bfloat16", "float16")
AXES = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1, "dsinks": None, "dbias": 2}  # which axis runs along the sequence
BARE, EXTRA = list(AXES)[:5], list(AXES)[5:]

Arrays = list[np.ndarray]


def make_inputs(dtype: str) -> Arrays:
    """Query, key, value, sinks, bias and the cotangents of out and LSE, in the dtype (sinks and the LSE's in float32)."""
    rng, heads = np.random.default_rng(0), (HEADS, KV_HEADS, KV_HEADS)
    qkv = [rng.standard_normal((1, LENGTH, held, DIM)) for held in heads]
    more = [rng.standard_normal(shape) for shape in ((HEADS,), (1, HEADS, LENGTH, LENGTH))]
    cotangents = [rng.standard_normal(shape) for shape in ((1, LENGTH, HEADS, DIM), (1, HEADS, LENGTH))]
    kinds = [dtype, dtype, dtype, "float32", dtype, dtype, "float32"]
    return [array.astype(jnp.dtype(kind)) for array, kind in zip(qkv + more + cotangents, kinds, strict=True)]


def results(attend: Callable[..., tuple], inputs: Arrays, both: bool) -> Arrays:
    """out, lse and the gradients of query, key and value; with `both` also those of sinks and bias."""

    @jax.jit
    def run(*arrays):
        held = arrays[:5] if both else arrays[:3]
        values, transpose = jax.vjp(attend, *held)
        return *values, *transpose(arrays[5:])

    return [np.asarray(array) for array in run(*inputs)]


def dense(inputs: Arrays, both: bool, number: str) -> Arrays:
    """The textbook formula over the whole sequence, computed in the dtype `number`; all results in float64 arrays."""

    def attend(*arrays):
        return tuple(reference_attention(*arrays, causal=True, dtype=number))

    with jax.enable_x64(True):
        return [array.astype(np.float64) for array in results(attend, [array.astype(number) for array in inputs], both)]


def ring(inputs: Arrays, both: bool, size: int, layout: str) -> Arrays:
    """jax_core.ring_attention over `size` devices; results in the sequence's natural order."""
    order, back = (np.array(f(layout, size, LENGTH)) for f in (permutation, inverse_permutation))
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))

    def attend(*arrays):
        return ring_attention(*arrays, causal=True, layout=layout, return_lse=True, mesh=mesh)

    moved = [take(array, order, axis) for array, axis in zip(inputs, (1, 1, 1, None, 2, 1, 2), strict=True)]
    got = results(attend, moved, both)
    return [take(array.astype(np.float64), back, axis) for array, axis in zip(got, AXES.values(), strict=False)]


def take(array: np.ndarray, order: np.ndarray, axis: int | None) -> np.ndarray:
    return array if axis is None else np.take(array, order, axis)


def rounded(array: np.ndarray, name: str, dtype: str) -> np.ndarray:
    return array.astype(jnp.dtype("float32" if name in ("lse", "dsinks") else dtype)).astype(np.float64)


def error(got: np.ndarray, exact: np.ndarray) -> str:
    """Root mean square of the error over that of the exact result; in brackets the largest error over the largest result."""
    off = got - exact
    return f"{np.sqrt(np.mean(off**2) / np.mean(exact**2)):.1e} ({np.max(np.abs(off)) / np.max(np.abs(exact)):.1e})"


def rows(dtype: str, names: list[str], layouts: tuple[str, ...]) -> Iterator[list[str]]:
    inputs, both = make_inputs(dtype), names == EXTRA
    exact = dense(inputs, both, "float64")

    def row(computed_by: str, got: Arrays) -> list[str]:
        pairs = {name: (rounded(have, name, dtype), true) for name, have, true in zip(AXES, got, exact, strict=False)}
        return [dtype, computed_by, *(error(*pairs[name]) for name in names)]

    yield row("plain, dense", dense(inputs, both, "float32"))
    yield row("ring of 1", ring(inputs, both, 1, "contiguous"))
    for layout, size in product(layouts, (2, 4, 8)):
        yield row(f"ring of {size}, {layout}", ring(inputs, both, size, layout))


def table(names: list[str], layouts: tuple[str, ...]) -> None:
    print("\n| " + " | ".join(["dtype", "computed by", *names]) + " |\n" + "|---" * (len(names) + 2) + "|")
    for dtype in DTYPES:
        for row in rows(dtype, names, layouts):
            print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    versions = f"jax {jax.__version__}, numpy {np.__version__}, Python {platform.python_version()}, CPU ({platform.machine()})"
    print(f"{versions}: causal, {LENGTH} tokens, {HEADS} query heads on {KV_HEADS} key heads, dim {DIM}")
    table(BARE, LAYOUTS)
    table(EXTRA, ("zigzag",))


if __name__ == "__main__":
    main()
