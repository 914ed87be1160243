"""How far the keys lie that a run of queries may see, if that is known and near."""

from typing import NamedTuple

from jax_core.masks.static import Mask


class Reach(NamedTuple):
    """A run of ``run`` queries sees no key more than ``left`` positions before its first query or ``right`` after its last."""

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
    near = Reach(max(min(before), 0), max(min(after), 0), run)
    return near if max(near.left, near.right) <= run else None


def _in_chunk(mask: Mask, run: int) -> int | None:
    """How far back a chunk reaches from the first position of a run."""
    if mask.chunk is None:
        return None
    return 0 if run % mask.chunk == 0 else mask.chunk - 1
