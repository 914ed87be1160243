"""Which mesh axes a value varies over inside ``shard_map`` (its ``check_vma`` types), if they are tracked."""

from collections.abc import Iterable
from typing import TypeVar

import jax
from jax import Array, lax

Tree = TypeVar("Tree")


def varying_axes(*values: object) -> frozenset[str]:
    """The union of the mesh axes that the arrays in ``values`` (pytrees) vary over; empty if they are not tracked."""
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(values)))


def vary(values: Tree, axes: Iterable[str]) -> Tree:
    """``values`` typed as varying over ``axes`` too. The transpose sums over these axes, so the gradient of a replicated operand is
    complete."""

    def cast(leaf: Array) -> Array:
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf), key=str))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, values)
