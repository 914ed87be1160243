"""The static mask: a predicate on positions, the interval of positions visible from one position, and the predicate on tiles.

Written with operators only (``&``, ``|``, comparisons, ``//``), so that one source serves Python ints, NumPy arrays, traced JAX
values and the scalars of a kernel language.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from jax_core.masks.layout import Run

Places: TypeAlias = Any  # positions, or booleans about them: Python's, NumPy's, JAX's, or a kernel language's
Either = Callable[[Places, Places], Places]  # the least of two, or the greatest

_FARTHEST = 2**31 - 1  # a wider window or a longer chunk hides nothing, unless positions are ids: see check_reach


@dataclass(frozen=True)
class Mask:
    """Which key positions a query position sees, decided by the positions alone.

    ``causal``: ``k <= q``. ``left``/``right``: a sliding window ``q - left <= k <= q + right`` (None: no bound on that side).
    ``chunk``: Llama-4's chunked attention, causal within ``q // chunk == k // chunk``.
    Positions are absolute: with fewer queries than keys, query 0 is at position 0 unless position ids say otherwise.
    A side may be negative where queries are counted from the last key (:func:`shifted`).
    ``any_position``: positions are ids, which may be any value of their integer type, so that a difference of two may overflow it.
    Without ids they are not negative and below ``2**30``.
    ``keys``: the keys of a pair are one run, which includes the queries' own positions; of its positions only ``0 .. keys - 1``
    hold a key, and it may begin before them or end after them. (None: every position of a run holds one.)
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    any_position: bool = False
    keys: int | None = None


Window = int | tuple[int | None, int | None] | list[int | None] | None


def make_mask(causal: bool = False, window: Window = None, chunk: int | None = None) -> Mask:
    """Checks the arguments and combines them: a causal mask is a window whose right side is 0."""
    left, right = _window_sides(window)
    if chunk is not None and (not is_integer(chunk) or chunk < 1):
        raise ValueError(f"chunk_size must be a positive int or None, got {chunk!r}")
    chunk = None if chunk is None else int(chunk)
    causal = bool(causal) or chunk is not None
    if causal and right is not None:
        right = None  # k <= q is the tighter bound
    return Mask(causal=causal, left=left, right=right, chunk=chunk if chunk is not None and chunk <= _FARTHEST else None)


def shifted(mask: Mask, by: int) -> Mask:
    """The same mask for queries whose positions count ``by`` too few. ``mask`` has no chunk, and its positions are no ids."""
    assert mask.chunk is None and not mask.any_position
    left = None if mask.left is None else mask.left - by
    right = by if mask.causal else None if mask.right is None else mask.right + by
    left, right = (None if side is not None and side > _FARTHEST else side for side in (left, right))
    return Mask(causal=right == 0, left=left, right=None if right == 0 else right)


def check_reach(window: Window, chunk: int | None) -> None:
    """ValueError for sides and chunks too long for int32 that may still hide keys: int32 ids may be up to ``2**32 - 1`` apart."""
    sides = window if isinstance(window, (tuple, list)) else (window,)
    wide = [side for side in sides if side is not None and _FARTHEST < side <= 2 * _FARTHEST]
    wide += [chunk] if chunk is not None and chunk > _FARTHEST else []
    if wide:
        raise ValueError(f"with position ids, sliding_window and chunk_size must be below 2**31 (or None), got {wide[0]}")


def _window_sides(window: Window) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(side is None or is_integer(side) for side in sides):
        raise ValueError(f"sliding_window must be an int, a pair (left, right) of ints, or None; got {window!r}")
    if any(side is not None and side < -1 for side in sides):
        raise ValueError(f"sliding_window sides must be >= 0, or -1 or None for no bound; got {window!r}")
    left, right = (None if side is None or side == -1 or side > _FARTHEST else int(side) for side in sides)
    return left, right


def is_integer(value: object) -> bool:
    """Includes NumPy's integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def both(a: Mask, b: Mask) -> Mask | None:
    """The mask that hides what either hides, or None if a ``Mask`` cannot express it: two different chunk lengths."""
    if None not in (a.chunk, b.chunk) and a.chunk != b.chunk:
        return None
    causal = a.causal or b.causal
    left, right = (
        min((side for side in sides if side is not None), default=None) for sides in ((a.left, b.left), (a.right, b.right))
    )
    redundant = causal and (right is None or right >= 0)  # k <= q is the tighter bound
    return Mask(causal=causal, left=left, right=None if redundant else right, chunk=a.chunk or b.chunk)


def visible(mask, q_pos, k_pos):  # Triton compiles this, and would evaluate an annotation
    # type: (Mask, Places, Places) -> Places
    """Elementwise: does the query at ``q_pos`` see the key at ``k_pos``? Arguments broadcast."""
    seen = (q_pos == q_pos) & (k_pos == k_pos)
    if mask.causal:
        seen = seen & (k_pos <= q_pos)
    if mask.any_position:
        # Add to one position, where wraparound can be detected; and floor the quotient even where // rounds towards 0.
        if mask.left is not None:
            first = q_pos - mask.left
            seen = seen & ((first <= k_pos) | (first > q_pos))
        if mask.right is not None:
            last = q_pos + mask.right
            seen = seen & ((k_pos <= last) | (last < q_pos))
        if mask.chunk is not None:
            q_chunk = q_pos // mask.chunk - (q_pos % mask.chunk < 0)
            k_chunk = k_pos // mask.chunk - (k_pos % mask.chunk < 0)
            seen = seen & (q_chunk == k_chunk)
    else:
        if mask.left is not None:
            seen = seen & (q_pos - k_pos <= mask.left)
        if mask.right is not None:
            seen = seen & (k_pos - q_pos <= mask.right)
        if mask.chunk is not None:
            seen = seen & (q_pos // mask.chunk == k_pos // mask.chunk)
    if mask.keys is not None:
        seen = seen & (k_pos >= 0) & (k_pos < mask.keys)
    return seen


def seen_from(mask, position, low, high, origin, of_keys, minimum, maximum):  # Triton compiles this too
    # type: (Mask, Places, Places, Places, Places, bool, Either, Either) -> tuple[Places, Places]
    """``(low, high)``: the interval within ``low .. high`` of the keys that a query at ``position`` sees (``of_keys``), or of the
    queries that see a key at ``position``; empty if ``low > high``. Agrees exactly with :func:`visible`, unless positions are ids.
    All positions are counted from ``origin``: counted from a run's start, most bounds are constants.

    Neither end decreases as ``position`` grows. So what any of the positions ``first`` to ``last`` sees lies within ``low(first) ..
    high(last)``, and all of them see ``low(last) .. high(first)``.
    """
    if of_keys:
        if mask.causal:
            high = minimum(high, position)
        if mask.left is not None:
            low = maximum(low, position - mask.left)
        if mask.right is not None:
            high = minimum(high, position + mask.right)
    else:
        if mask.causal:
            low = maximum(low, position)
        if mask.left is not None:
            high = minimum(high, position + mask.left)
        if mask.right is not None:
            low = maximum(low, position - mask.right)
    if mask.chunk is not None:
        start = (position + origin) // mask.chunk * mask.chunk - origin
        low = maximum(low, start)
        high = minimum(high, start + (mask.chunk - 1))
    if mask.keys is not None:
        if of_keys:
            low = maximum(low, -origin)
            high = minimum(high, mask.keys - 1 - origin)
        else:  # no query sees a position without a key: -1 and 1 say that it is before, or after, those with one
            span = high - low + 1
            high = high + minimum(maximum(position + origin, -1), 0) * span
            low = low + maximum(minimum(position + origin - (mask.keys - 1), 1), 0) * span
    return low, high


def empty(mask: Mask, q_run: Run, k_run: Run) -> Places:
    """No query of ``q_run`` sees a key of ``k_run``, judged by the runs' first and last positions.

    Never true for a tile with a visible pair. May be false for a tile that is empty only because of its strides.
    """
    (q_first, q_last), (k_first, k_last) = _ends(q_run), _ends(k_run)
    none = q_first > q_last  # False, in the type of the positions
    if mask.causal:
        none = none | (k_first > q_last)
    if mask.left is not None:
        none = none | _further(mask, q_first, k_last, mask.left)
    if mask.right is not None:
        none = none | _further(mask, k_first, q_last, mask.right)
    if mask.chunk is not None:
        none = none | (k_last // mask.chunk < q_first // mask.chunk) | (k_first // mask.chunk > q_last // mask.chunk)
    if mask.keys is not None:
        none = none | (k_last < 0) | (k_first >= mask.keys)
    return none


def full(mask: Mask, q_run: Run, k_run: Run) -> Places:
    """Every query of ``q_run`` sees every key of ``k_run``. Never true for a tile with a hidden pair."""
    (q_first, q_last), (k_first, k_last) = _ends(q_run), _ends(k_run)
    every = q_first <= q_last  # True, in the type of the positions
    if mask.causal:
        every = every & (k_last <= q_first)
    if mask.left is not None:
        every = every & _within(mask, q_last, k_first, mask.left)
    if mask.right is not None:
        every = every & _within(mask, k_last, q_first, mask.right)
    if mask.chunk is not None:
        every = every & (q_first // mask.chunk == k_last // mask.chunk) & (q_last // mask.chunk == k_first // mask.chunk)
    if mask.keys is not None:
        every = every & (k_first >= 0) & (k_last < mask.keys)
    return every


def _further(mask: Mask, a: Places, b: Places, side: int) -> Places:
    """``a - b > side``, even if the difference does not fit into the positions' type."""
    if not mask.any_position:
        return a - b > side
    return (a - side > b) & (a - side <= a)


def _within(mask: Mask, a: Places, b: Places, side: int) -> Places:
    """``a - b <= side``, likewise."""
    if not mask.any_position:
        return a - b <= side
    return (a - side <= b) | (a - side > a)


def _ends(run: Run) -> tuple[Places, Places]:
    return run.start, run.start + run.stride * (run.length - 1)
