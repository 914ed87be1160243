"""How much a rank computes at a step: the visible scores of its queries and a shard of keys, counted exactly and for all ranks at
once, by arithmetic on their runs."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from jax_core.masks.layout import Layout, Run, check_shard_length, runs
from jax_core.masks.static import Mask

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Call:
    """Self-attention over ``size`` ranks that hold ``length`` positions each. ``itemsize``: bytes of an element of q, k, v.
    ``home_itemsize``: of dK/dV on the way home, if not as many."""

    length: int
    size: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    batch: int = 1
    itemsize: int = 2
    mask: Mask = Mask(causal=True)
    layout: Layout = "zigzag"
    home_itemsize: int | None = None

    def __post_init__(self) -> None:
        check_shard_length(self.layout, self.length, size=self.size)

    def split_over(self, size: int) -> "Call":
        """The same sequence on ``size`` ranks. Raises ValueError if it cannot be split evenly."""
        tokens = self.length * self.size
        if tokens % size:
            raise ValueError(
                f"the sequence's length must be a multiple of the number of ranks; got {tokens} tokens on {size} ranks"
            )
        return replace(self, length=tokens // size, size=size)

    def flop(self, direction: str) -> float:
        """Floating point operations of all ranks, a score of a causal square's diagonal counted as half, as is customary."""
        shares = (seen(self, shift).scores.sum() for shift in range(self.size))
        counted = sum(shares) - (self.size * self.length / 2 if self.mask.causal else 0)
        return float(counted * flop_per_score(self, direction))


def flop_per_score(call: Call, direction: str) -> int:
    """Of all heads: two products in the forward, five in the backward."""
    dims = call.dim + call.value_dim if direction == "forward" else 3 * call.dim + 2 * call.value_dim
    return 2 * call.batch * call.heads * dims


class Seen(NamedTuple):
    """Per rank, of one head: visible ``scores``, and ``cut``, the rows at which a bound of the mask lies within the keys."""

    scores: np.ndarray
    cut: np.ndarray


@lru_cache(maxsize=8192)  # a fit asks for the same calls many times
def seen(call: Call, shift: int) -> Seen:
    """What each rank computes on the keys of the rank ``shift`` before it."""
    ranks = np.arange(call.size)
    queries = runs(call.layout, ranks, call.size, call.length)
    keys = runs(call.layout, (ranks - shift) % call.size, call.size, call.length)
    return Seen(*np.sum([_pair(call, *pair) for pair in product(queries, keys)], axis=0))


def _pair(call: Call, q_run: Run, k_run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Of two runs. A chunked mask is the sum of its chunks, each of which is a causal band over the parts of the runs within it."""
    chunk = call.mask.chunk or call.size * call.length
    starts = np.arange(0, call.size * call.length, chunk)[:, None]
    (q_start, rows), (k_start, columns) = (_within(run, starts, starts + chunk) for run in (q_run, k_run))
    left, right = call.mask.left, 0 if call.mask.causal else call.mask.right
    # Row i sees column j if  first <= j - i <= last: both runs have the same stride.
    last = columns - 1 if right is None else (q_start - k_start + right) // q_run.stride
    first = -rows + 1 if left is None else -((k_start - q_start + left) // q_run.stride)
    count = np.maximum(_below(rows, columns, last) - _below(rows, columns, first - 1), 0)
    cut = sum(_cut(rows, columns, bound) for bound, given in ((last, right), (first - 1, left)) if given is not None)
    return count.sum(0), (cut + np.zeros_like(count)).sum(0)


def _within(run: Run, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first position and the length of the part of a run that is in ``start .. stop - 1``."""
    skipped = np.clip(-((run.start - start) // run.stride), 0, run.length)
    ended = np.clip(-((run.start - stop) // run.stride), 0, run.length)
    return run.start + skipped * run.stride, np.maximum(ended - skipped, 0)


def _below(rows: np.ndarray, columns: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The pairs ``(i, j)`` with ``j - i <= bound``."""

    def up_to(y):  # the sum of min(u, columns) over u = 1 .. y
        capped = np.clip(y, 0, columns)
        return capped * (capped + 1) // 2 + columns * np.maximum(y - columns, 0)

    return up_to(rows + bound) - up_to(bound)


def _cut(rows: np.ndarray, columns: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The rows ``i`` that see some of the columns ``j <= i + bound``, but not all."""
    return np.maximum(np.minimum(rows, columns - 1 - bound) - np.maximum(0, -bound), 0)
