"""Which rows of a pair of shards a call covers.

In a causal ring the pair of a rank's queries and another rank's keys is one rectangle of scores: the last rows of the queries (all,
half or none) and the first of the keys. Which, only the device knows; flash-attn-4 reads it there, as the offsets and lengths of
packed sequences, so that nothing is sliced, copied or computed in vain.

The layout decides which:

- contiguous: keys of a lower rank are seen by all queries, those of a higher one by none;
- zigzag: keys of a lower rank are seen by all queries, but of these keys only the early half; those of a higher one, both halves,
  by the late half of the queries.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_core.kernels.contract import Pair, Runs, Scores
from jax_core.masks.static import Mask

Where = tuple[Array | None, Array | None, Array | None, Array | None]  # offsets and lengths of queries, offsets and lengths of keys
WHOLE: Where = (None, None, None, None)


class Rectangle(NamedTuple):
    """Query rows from ``q_first`` on, key rows ``k_first`` up to ``k_end``, numbers on the device."""

    q_first: Any
    k_end: Any
    k_first: Any = 0


def rectangle(pair: Pair) -> Rectangle:
    """Of two different ranks' shards in a causal ring."""
    before, q_length, k_length = pair.k_runs[0].start < pair.q_runs[0].start, pair.q.shape[1], pair.k.shape[1]
    if len(pair.q_runs) == 1:
        return Rectangle(jnp.where(before, 0, q_length), jnp.where(before, k_length, 0))
    return Rectangle(jnp.where(before, 0, q_length // 2), jnp.where(before, k_length // 2, k_length))


def is_within(mask: Mask) -> bool:
    """Do the keys include the queries' own positions, so that flash-attn-4's masks, aligned to the last query and the last key, are
    right for the keys up to the last query?"""
    return mask.keys is not None and mask.causal and mask.chunk is None and not mask.any_position


def within(pair: Pair) -> Rectangle:
    """All queries, and of the keys those that exist, up to the last query's own."""
    (q_run,), (k_run,) = pair.q_runs, pair.k_runs
    first, end = (jnp.clip(at - k_run.start, 0, k_run.length) for at in (0, q_run.start + q_run.length))
    return Rectangle(jnp.int32(0), end, first)


def where_of(area: Rectangle, pair: Pair) -> Where:
    """As flash-attn-4 reads it, for operands whose batch entries follow one another: ``[batch * length, heads, dim]``."""
    batch, q_length, k_length = *pair.q.shape[:2], pair.k.shape[1]
    if batch == 1:
        ends = jnp.stack([area.q_first, q_length]), jnp.stack([area.k_first, area.k_end])
        return ends[0].astype(jnp.int32), None, ends[1].astype(jnp.int32), None
    entries, ones = jnp.arange(batch + 1, dtype=jnp.int32), jnp.ones(batch, jnp.int32)
    return (
        entries * q_length + area.q_first.astype(jnp.int32),
        ones * (q_length - area.q_first).astype(jnp.int32),
        entries * k_length + jnp.asarray(area.k_first, jnp.int32),
        ones * (area.k_end - area.k_first).astype(jnp.int32),
    )


def offsets(batch: int, length: int) -> Array:
    """Those of whole batch entries."""
    return jnp.arange(batch + 1, dtype=jnp.int32) * length


def is_static(runs: Runs) -> bool:
    """Is this the only shard of its sequence? (Then its position is a number, otherwise a value on the device.)"""
    return isinstance(runs[0].start, int)


def needs_lists(scores: Scores, has_data: bool, alone: bool, same_length: bool, scattered: bool) -> bool:
    """Can flash-attn-4 not compute this by its causal mask, its windows and rectangles alone? ``alone``: no ring. ``scattered``:
    a shard is more than two runs."""
    mask = scores.mask
    if scattered and mask != Mask():
        return True
    if has_data or scores.predicates or mask.chunk is not None or mask.any_position:
        return True
    if is_within(mask):
        return False
    windowed = mask.left is not None or mask.right is not None
    return (windowed and not alone) or ((windowed or mask.causal) and not same_length)


def packs(pair: Pair, listed: bool) -> bool:
    """Are all pairs of this pass packed, and so the sums of its gradients? With one batch entry there is no difference."""
    return pair.q.shape[0] > 1 and pair.scores.mask.causal and not listed and not is_static(pair.q_runs)
