"""The results of a rank's pairs on their way to one: continued by the kernel, or joined a few at a time."""

from typing import NamedTuple

from jax_core.kernels.contract import Partial
from jax_core.kernels.merge import join


class Found(NamedTuple):
    """The result so far: a partial, and those of later pairs that have not been joined to it."""

    carry: Partial | None
    apart: tuple[Partial, ...]


MOST_APART = 4  # a partial is an output in 16 bits


def joined(found: Found, dtype, from_count: int = 1) -> Found:
    """With everything in ``carry``, its output in ``dtype``, unless fewer than ``from_count`` partials are apart."""
    if len(found.apart) < from_count:
        return found
    first, *others = found.apart if found.carry is None else (found.carry, *found.apart)
    return Found(join([first, *others], dtype) if others else first._replace(out=first.out.astype(dtype)), ())


def only(found: Found) -> Partial:
    assert found.carry is not None and not found.apart
    return found.carry
