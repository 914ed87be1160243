"""Which shards each rank attends to, in which order, and what travels between hosts meanwhile.

Rank ``(h, g)`` is rank ``g`` of host ``h``. A *shift* ``(o, i)`` stands for the keys of rank ``(h - o, g - i)``, and a *hop*
``(o, i)`` sends what a rank has to rank ``(h + o, g + i)``; both count modulo the hosts and the ranks of a host.
"""

from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from jax_core.masks.layout import Layout
from jax_core.masks.static import Mask
from jax_core.strategies.rotation import Step, steps
from jax_core.strategies.visibility import Visibility

Shift = tuple[int, int]
Hop = tuple[int, int]


class HostStep(NamedTuple):
    """A host's ranks attend to the shards of one host.

    ``first``: the second number of the first shift; ``steps``: within the host. ``hop_out``: how the keys that a rank had at its
    first step reach the rank that needs them at the first step for the next host; ``hop_in``: how the sums of dK/dV that it had
    after the previous host's steps reach the rank that has the same shard's after these. None where there is none.
    """

    first: int
    steps: tuple[Step, ...]
    hop_in: Hop | None
    hop_out: Hop | None


def host_steps(shifts: tuple[Shift, ...]) -> list[HostStep]:
    """``shifts``: ascending, from ``(0, 0)``."""
    hosts = [(host, [inner for _, inner in group]) for host, group in groupby(shifts, itemgetter(0))]
    hops = [
        ((to - source, after[0] - before[0]), (to - source, after[-1] - before[-1]))
        for (source, before), (to, after) in pairwise(hosts)
    ]
    outs, ins = [hop for hop, _ in hops], [hop for _, hop in hops]
    return [
        HostStep(inner[0], tuple(steps(inner)), hop_in, hop_out)
        for (_, inner), hop_in, hop_out in zip(hosts, [None, *ins], [*outs, None], strict=True)
    ]


def visible_shifts(mask: Mask, layout: Layout, sizes: tuple[int, int], q_length: int, k_length: int) -> tuple[Shift, ...]:
    """The shifts at which some rank may see a key, ascending, and ``(0, 0)``; all if positions are data. ``q_length``,
    ``k_length``: lengths of a shard."""
    sees = Visibility(mask, layout, sizes[0] * sizes[1], q_length, k_length)
    ranks = np.arange(sizes[0] * sizes[1]).reshape(sizes)
    return tuple(
        shift
        for shift in product(range(sizes[0]), range(sizes[1]))
        if shift == (0, 0) or mask.any_position or sees.any_rank(np.roll(ranks, shift, axis=(0, 1)).reshape(-1))
    )


def way_home(shifts: tuple[Shift, ...], sizes: tuple[int, int]) -> Hop:
    """From the rank that has the sums of a shard's dK/dV after the last step to the shard's owner."""
    host, inner = shifts[-1]
    return -host % sizes[0], -inner % sizes[1]
