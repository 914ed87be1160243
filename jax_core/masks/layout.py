"""How a sequence is laid out over a ring, as arithmetic on positions.

A shard holds one or two *runs* of global positions, so no position array is ever sent: the positions of arriving K/V follow from
the rank they came from. Everything here is plain integer arithmetic with operators, so a rank may be a Python int or a traced JAX
value.

Layouts, for ring size ``N``, rank ``r`` and shard length ``T``:

- ``contiguous``: positions ``r*T .. (r+1)*T - 1``;
- ``zigzag`` (also head-tail, dual chunk swap): chunks ``r`` and ``2N-1-r`` of ``2N`` equal chunks, which balances causal work;
- ``striped``: positions ``r, r+N, r+2N, ...`` (Brandon et al. 2023, "Striped Attention", arXiv:2311.09431).
"""

from typing import Any, Literal, NamedTuple, get_args

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class Run(NamedTuple):
    """The ``length`` positions ``start, start + stride, ...``. ``start`` may be traced; the others are ints, except where only the
    ends of runs are read."""

    start: Any
    stride: Any
    length: int


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")


def shard_multiple(layout: str) -> int:
    """A shard's length must be a multiple of this."""
    check_layout(layout)
    return 2 if layout == "zigzag" else 1


def check_shard_length(layout: str, length: int, name: str = "shard") -> None:
    if length % shard_multiple(layout):
        raise ValueError(
            f"{layout} needs a {name} length divisible by {shard_multiple(layout)}, got {length}; pad the sequence to a "
            f"multiple of {shard_multiple(layout)} x the ring size (ring_attn.pad does)"
        )


def runs(layout: str, rank, size: int, length: int) -> tuple[Run, ...]:
    """The runs of positions that ``rank`` of a ring of ``size`` holds in a shard of ``length`` positions, in shard order."""
    check_shard_length(layout, length)
    if layout == "striped":
        return (Run(rank, size, length),)
    if layout == "contiguous" or size == 1:
        return (Run(rank * length, 1, length),)
    half = length // 2
    return (Run(rank * half, 1, half), Run((2 * size - 1 - rank) * half, 1, half))


def padded_length(layout: str, size: int, length: int) -> int:
    """The smallest length >= ``length`` that the layout can split over ``size`` ranks."""
    multiple = size * shard_multiple(layout)
    return -(-length // multiple) * multiple


def shard_indices(layout: str, rank: int, size: int, length: int) -> list[int]:
    """The global positions, in shard order, that ``rank`` holds of a sequence of ``length`` positions."""
    if length % (size * shard_multiple(layout)):
        raise ValueError(
            f"{layout} over {size} ranks needs a sequence length divisible by {size * shard_multiple(layout)}, got {length}; "
            f"pad it to {padded_length(layout, size, length)} (ring_attn.pad does)"
        )
    held = runs(layout, rank, size, length // size)
    return [run.start + run.stride * i for run in held for i in range(run.length)]


def permutation(layout: str, size: int, length: int) -> list[int]:
    """The order of the positions of a whole sequence when the shards of all ranks are concatenated.

    ``sequence[permutation(...)]`` brings a sequence into the layout's order; :func:`inverse_permutation` undoes it.
    """
    return [position for rank in range(size) for position in shard_indices(layout, rank, size, length)]


def inverse_permutation(layout: str, size: int, length: int) -> list[int]:
    """``inverse_permutation[permutation[i]] == i``: brings a sequence from the layout's order back into sequence order."""
    inverse = [0] * length
    for place, position in enumerate(permutation(layout, size, length)):
        inverse[position] = place
    return inverse
