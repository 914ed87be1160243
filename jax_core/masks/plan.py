"""``Plan``: a layout in which each rank holds pieces of the sequence from anywhere. :func:`jax_core.balance` makes one."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from weakref import WeakValueDictionary

import numpy as np

from jax_core.masks.layout import Index, Layout, Run

_PLANS: "WeakValueDictionary[int, Plan]" = WeakValueDictionary()  # all that there are, by id: equal ones have one name
FEWEST = 3  # with two pieces a rank it would pass for zigzag, and with one for contiguous (Arrangement says why)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A layout: which pieces of a sequence each rank of a ring holds, for queries and keys alike.

    ``piece``: positions in a piece; piece ``i`` is positions ``i * piece .. (i + 1) * piece - 1``. ``table``: each rank's pieces,
    ascending, equally many and at least three (a ring of one may have fewer). Plans with equal pieces are equal, in every process.
    ``areas``: the visible query-key pairs of each rank's queries, if known; ``steps``: how many of these have their key on the rank
    ``s`` before it, ``[rank][s]``. ``name``: short, of the pieces alone.

    Raises ValueError for a table that is no partition.
    """

    piece: int
    table: tuple[tuple[int, ...], ...]
    areas: tuple[int, ...] | None = field(default=None, kw_only=True)
    steps: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    name: str = field(init=False)

    feature = "plan"

    def __post_init__(self) -> None:
        self._check()
        # An attribute, not a property: torch.compile can read it, and cannot pass a plan to where it is no longer traced.
        object.__setattr__(self, "name", f"plan {self._digest[:12]} of {self.pieces} pieces of {self.piece}")
        _PLANS[id(self)] = self

    def _check(self) -> None:
        if not isinstance(self.piece, Integral) or self.piece < 1:
            raise ValueError(f"piece must be a positive int, the positions of a piece; got {self.piece!r}")
        lengths = {len(pieces) for pieces in self.table}
        if len(lengths) != 1 or (self.size > 1 and min(lengths) < FEWEST):
            raise ValueError(
                f"table must give every rank equally many pieces, at least {FEWEST}; got {sorted(lengths)} for {self.size} ranks"
            )
        if any(list(pieces) != sorted(pieces) for pieces in self.table):
            raise ValueError(f"table must list the pieces of each rank in ascending order, got {_shortened(self.table)}")
        if sorted(number for pieces in self.table for number in pieces) != list(range(self.pieces)):
            raise ValueError(
                f"table must hold each piece from 0 to {self.pieces - 1} once, over all ranks; got {_shortened(self.table)}"
            )

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.table)

    @property
    def pieces(self) -> int:
        """Pieces of the whole sequence."""
        return sum(len(pieces) for pieces in self.table)

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.pieces * self.piece

    @property
    def shard_multiple(self) -> int:
        """A shard's length."""
        return self.length // self.size

    @property
    def imbalance(self) -> float | None:
        """The largest work of a rank over the mean, less 1: what the other ranks wait, over a whole pass. Work is visible pairs of
        queries and keys; kernels compute by blocks, so the time differs a little. None if the areas are not known."""
        return None if self.areas is None else _excess(max(self.areas), sum(self.areas) / self.size)

    @property
    def ring_imbalance(self) -> float | None:
        """The same where ranks wait for each other at every step of a ring: the sum over steps of the largest area, over the mean
        area, less 1. None if the areas are not known for each pair of pieces."""
        if self.areas is None or self.steps is None:
            return None
        return _excess(sum(map(max, zip(*self.steps, strict=True))), sum(self.areas) / self.size)

    def check_size(self, size: int) -> None:
        if size != self.size:
            raise ValueError(
                f"{self} is for a ring of {self.size}, and this is a ring of {size}; make one with balance for {size} ranks"
            )

    def check_shard_length(self, length: int, name: str = "shard", size: int = 1) -> None:
        if length * size != self.length:
            ranks = "" if size == 1 else f" on each of {size} ranks"
            raise ValueError(
                f"{self} is for queries and keys of {self.length} positions, {self.shard_multiple} on each rank; got a {name} of "
                f"{length}{ranks}; make another with balance, or pad the sequence (ring_attn.pad does)"
            )

    def padded_length(self, size: int, length: int) -> int:
        self.check_size(size)
        if length > self.length:
            raise ValueError(f"{self} is for {self.length} positions, got {length}; make another with balance")
        return self.length

    def runs(self, rank: Index, size: int, length: int) -> tuple[Run, ...]:
        """One for each piece. A traced rank reads a table of constants."""
        self.check_size(size)
        self.check_shard_length(length, size=size)
        if size == 1:
            return (Run(rank * length, 1, length),)
        return tuple(Run(start, 1, self.piece) for start in self._starts_of(rank))

    def _starts_of(self, rank: Index) -> Iterable[Index]:
        if isinstance(rank, Integral):
            return self._starts[rank].tolist()
        if isinstance(rank, np.ndarray):
            return np.moveaxis(self._starts[rank], -1, 0)
        import jax.numpy as jnp  # a traced rank has loaded it

        return jnp.asarray(self._starts)[rank]

    @cached_property
    def _starts(self) -> np.ndarray:
        """int32 ``[ranks, pieces of a rank]``"""
        return (np.array(self.table) * self.piece).astype(np.int32)

    @cached_property
    def _digest(self) -> str:
        table = np.array([self.piece, self.size, *np.ravel(self.table)], "<i8")
        return hashlib.sha256(table.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._digest == other._digest

    def __hash__(self) -> int:
        return int(self._digest[:15], 16)

    def __str__(self) -> str:
        known = (("imbalance", self.imbalance), ("ring_imbalance", self.ring_imbalance))
        words = ", ".join(f"{name} {number:.1%}" for name, number in known if number is not None)
        return f"{self.name} ({words})" if words else self.name

    def __repr__(self) -> str:
        return f"<{self} on {self.size} ranks>"


def named(layout: Layout) -> Layout:
    """The plan of this name; any other layout as it is."""
    return next((plan for plan in list(_PLANS.values()) if plan.name == layout), layout)


def _excess(largest: float, mean: float) -> float:
    return largest / mean - 1 if mean else 0.0


def _shortened(table: Sequence[Sequence[int]]) -> str:
    text = str(table)
    return text if len(text) <= 200 else f"{text[:200]} ..."
