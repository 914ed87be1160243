"""How far the keys lie that a run of queries may see, if that is known and near."""

from dataclasses import replace
from typing import NamedTuple

from jax_core.masks.static import Mask

_BLOCK = 128


class Reach(NamedTuple):
    """A run of ``run`` queries sees no key more than ``left`` positions before its first or ``right`` after its last."""

    left: int
    right: int
    run: int


def reach(mask: Mask, layout: object, size: int, lengths: tuple[int, int], plain: bool) -> Reach | None:
    """None if the whole sequence is needed, or more than a neighbouring run. ``lengths``: of a shard of queries and of keys.
    ``plain``: the request has no array with a column for each key, and no mask or position that only data decides."""
    halves = {"contiguous": 1, "zigzag": 2}.get(layout) if isinstance(layout, str) else None
    if halves is None or size == 1 or not plain or mask.any_position or lengths[0] != lengths[1]:
        return None
    run = lengths[0] // halves
    before = [side for side in (mask.left, _in_chunk(mask, run)) if side is not None]
    after = [side for side in (mask.right, 0 if mask.causal else None) if side is not None]
    if not before or not after:
        return None
    left, right = (_in_blocks(max(min(sides), 0), run) for sides in (before, after))
    return Reach(left, right, run) if max(left, right) <= run else None


def bounded(mask: Mask, size: int, lengths: tuple[int, int]) -> Mask:
    """The mask of a kernel's call, whose keys are one run that includes the queries' own positions, if there are as many keys as
    queries. (A run at an end of the sequence has no neighbour.)"""
    if mask == Mask() or mask.any_position or lengths[0] != lengths[1]:
        return mask
    return replace(mask, keys=size * lengths[1])


def _in_blocks(positions: int, run: int) -> int:
    """As many or a few more: kernels want whole blocks of keys before the queries' own."""
    return -(-positions // _BLOCK) * _BLOCK if run % _BLOCK == 0 else positions


def _in_chunk(mask: Mask, run: int) -> int | None:
    """How far back a chunk reaches from the first position of a run."""
    if mask.chunk is None:
        return None
    return 0 if run % mask.chunk == 0 else mask.chunk - 1
