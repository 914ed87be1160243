"""The bytes by which a recurrence chooses between its two ways over a ring: what a rank sends in a forward and its backward, less
ids and final states."""

from collections.abc import Sequence
from math import prod

from jax_core.recurrence.heads import heads_sent
from jax_core.recurrence.layer import Operand, Shaped, dims_of

STRATEGIES = ("auto", "prefix", "ulysses")


def prefix_bytes(sizes: dict[str, int], map_size: int, itemsize: int, pieces: int, size: int) -> int:
    """``M`` and ``E`` of each head and piece, to every other rank, in each pass. ``map_size``: the numbers of an ``M``."""
    states = sizes["b"] * sizes["h"] * (map_size + sizes["k"] * sizes["v"])
    return 2 * (size - 1) * pieces * states * itemsize


def ulysses_bytes(signature: Sequence[Operand], operands: Sequence[Shaped | None], like: str, size: int) -> int:
    """Operands with tokens there, in each pass, and ``y`` back; the cotangent of ``y`` there, and those of the operands back."""
    given = [(of.name, dims_of(of, x), x) for of, x in zip(signature, operands, strict=True) if x is not None]
    sent = {name: _bytes(dims, x, size) for name, dims, x in given if "t" in dims}
    return (3 * sum(sent.values()) + 2 * sent[like]) * (size - 1) // size


def _bytes(dims: str, x: Shaped, size: int) -> int:
    batch, length, _, *rest = x.shape
    return batch * length * heads_sent(dims, x, size) * prod(rest) * x.dtype.itemsize
