"""How a sequence is laid out over a ring, as arithmetic on positions.

A shard holds one or more *runs* of global positions, all of one length and stride, so no position array is ever sent: the positions
of arriving K/V follow from the rank they came from. Everything here is plain integer arithmetic with operators, so a rank may be a
Python int, a NumPy array of ranks, or a traced JAX value.

Layouts, for ring size ``N``, rank ``r`` and shard length ``T``:

- ``contiguous``: positions ``r*T .. (r+1)*T - 1``;
- ``zigzag`` (also head-tail, dual chunk swap): chunks ``r`` and ``2N-1-r`` of ``2N`` equal chunks, which balances causal work;
- ``striped``: positions ``r, r+N, r+2N, ...`` (Brandon et al. 2023, "Striped Attention", arXiv:2311.09431);
- an object with the methods of :class:`Arrangement`, such as a plan that ``balance`` made (:mod:`jax_core.masks.plan`).
"""

from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

LayoutName = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)


class Index(Protocol):
    """An int, a NumPy array of several, or a value on the device."""

    def __add__(self, other: int, /) -> "Index": ...

    def __radd__(self, other: int, /) -> "Index": ...

    def __rsub__(self, other: int, /) -> "Index": ...

    def __mul__(self, other: int, /) -> "Index": ...


class Run(NamedTuple):
    """The ``length`` positions ``start, start + stride, ...``. ``start`` may be traced; the others are ints, except where only the
    ends of runs are read."""

    start: Any
    stride: Any
    length: int


@runtime_checkable
class Arrangement(Protocol):
    """A layout that is an object: hashable, equal on all ranks, as is its ``str()``, which is short. A rank has more than two runs,
    unless it is alone and holds the sequence in order: kernels take two runs for zigzag, and one for another name.

    ``feature``: the name by which strategies and kernels declare that they take it (``request.features``). ``shard_multiple``: a
    shard's length is a multiple of it. The methods are the functions below of the same names, without ``layout``; they raise
    ValueError for a size or length that the layout is not for.
    """

    @property
    def feature(self) -> str: ...

    @property
    def shard_multiple(self) -> int: ...

    def check_size(self, size: int) -> None: ...

    def check_shard_length(self, length: int, name: str, size: int) -> None: ...

    def runs(self, rank: Index, size: int, length: int) -> tuple[Run, ...]: ...

    def padded_length(self, size: int, length: int) -> int: ...


Layout = str | Arrangement


def check_layout(layout: Layout, size: int | None = None) -> None:
    """``size``: of the ring, where it is known."""
    if not isinstance(layout, str):
        arranged = _arranged(layout)
        if size is not None:
            arranged.check_size(size)
    elif layout not in LAYOUTS:
        raise _unknown(layout)


def _arranged(layout: Arrangement) -> Arrangement:
    if not isinstance(layout, Arrangement):
        raise _unknown(layout)
    return layout


def _unknown(layout: object) -> ValueError:
    return ValueError(f"layout must be one of {', '.join(LAYOUTS)}, or a plan that balance made; got {layout!r}")


def feature(layout: Layout) -> str:
    """The name by which strategies and kernels declare that they take the layout."""
    return layout if isinstance(layout, str) else layout.feature


def shard_multiple(layout: Layout) -> int:
    """A shard's length must be a multiple of this."""
    check_layout(layout)
    if not isinstance(layout, str):
        return layout.shard_multiple
    return 2 if layout == "zigzag" else 1


def check_shard_length(layout: Layout, length: int, name: str = "shard", size: int = 1) -> None:
    """``size``: how many such shards make the sequence (1 also where ``length`` is that of the whole sequence)."""
    if not isinstance(layout, str):
        _arranged(layout).check_shard_length(length, name, size)
    elif length % shard_multiple(layout):
        raise ValueError(
            f"{layout} needs a {name} length divisible by {shard_multiple(layout)}, got {length}; pad the sequence to a "
            f"multiple of {shard_multiple(layout)} x the ring size (ring_attn.pad does)"
        )


def runs(layout: Layout, rank: Index, size: int, length: int) -> tuple[Run, ...]:
    """The runs of positions that ``rank`` of a ring of ``size`` holds in a shard of ``length`` positions, in shard order."""
    if not isinstance(layout, str):
        return _arranged(layout).runs(rank, size, length)
    check_shard_length(layout, length)
    if layout == "striped":
        return (Run(rank, size, length),)
    if layout == "contiguous" or size == 1:
        return (Run(rank * length, 1, length),)
    half = length // 2
    return (Run(rank * half, 1, half), Run((2 * size - 1 - rank) * half, 1, half))


def run_length(layout: Layout, size: int, length: int) -> int:
    """The positions of each run of a shard."""
    return runs(layout, 0, size, length)[0].length


def padded_length(layout: Layout, size: int, length: int, buckets: int = 0) -> int:
    """The smallest length >= ``length`` that the layout can split over ``size`` ranks; with ``buckets``, the smallest of that many
    in each octave, so that few lengths are met. It is its own padded length. A plan is for one length, and has no buckets.

    Raises ValueError for ``buckets`` that are no count.
    """
    check_buckets(buckets)
    if not isinstance(layout, str):
        return _arranged(layout).padded_length(size, length)
    return rounded_up(length, size * shard_multiple(layout), buckets)


def rounded_up(length: int, multiple: int, buckets: int = 0) -> int:
    """The smallest multiple >= ``length``; with ``buckets``, of that many between ``multiple * 2**n`` and ``multiple * 2**(n+1)``,
    for every n."""
    units = -(-length // multiple)
    if buckets and units > 1:
        below = 1 << (units - 1).bit_length() - 1  # the largest power of two under ``units``
        step = -(-below // buckets)
        units = min(-(-units // step) * step, 2 * below)
    return units * multiple


def check_buckets(buckets: object) -> None:
    if not isinstance(buckets, int) or isinstance(buckets, bool) or buckets < 0:
        raise ValueError(f"buckets must be a number of lengths an octave, 0 for none; got {buckets!r}")


def check_whole_length(layout: Layout, size: int, length: int, where: str = "") -> None:
    """ValueError for a sequence that ``size`` ranks cannot share in this layout. ``where``: the end of what came, in words."""
    padded = padded_length(layout, size, length)
    if padded != length:
        multiple = size * shard_multiple(layout) if isinstance(layout, str) else padded
        raise ValueError(
            f"{layout} over {size} ranks needs a sequence length divisible by {multiple}, got {length}{where}; "
            f"pad it to {padded} (ring_attn.pad does)"
        )


def shard_indices(layout: Layout, rank: int, size: int, length: int) -> list[int]:
    """The global positions, in shard order, that ``rank`` holds of a sequence of ``length`` positions."""
    check_whole_length(layout, size, length)
    shard = runs(layout, rank, size, length // size)
    return list(chain.from_iterable(range(run.start, run.start + run.stride * run.length, run.stride) for run in shard))


def permutation(layout: Layout, size: int, length: int) -> list[int]:
    """The order of the positions of a whole sequence when the shards of all ranks are concatenated.

    ``sequence[permutation(...)]`` brings a sequence into the layout's order; :func:`inverse_permutation` undoes it.
    """
    return list(chain.from_iterable(shard_indices(layout, rank, size, length) for rank in range(size)))


def inverse_permutation(layout: Layout, size: int, length: int) -> list[int]:
    """``inverse_permutation[permutation[i]] == i``: brings a sequence from the layout's order back into sequence order."""
    inverse = [0] * length
    for place, position in enumerate(permutation(layout, size, length)):
        inverse[position] = place
    return inverse
