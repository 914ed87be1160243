"""Which shards each rank attends to, in which order, and what travels between hosts meanwhile.

Rank ``(h, g)`` is rank ``g`` of host ``h``. A *shift* ``(o, i)`` stands for the keys of rank ``(h - o, g - i)``, and a *hop*
``(o, i)`` sends what a rank has to rank ``(h + o, g + i)``; both count modulo the hosts and the ranks of a host.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from jax_core.strategies.rotation import Step, steps

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


def host_steps(shifts: Sequence[Shift]) -> list[HostStep]:
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


def way_home(shifts: Sequence[Shift], sizes: tuple[int, int]) -> Hop:
    """From the rank that has the sums of a shard's dK/dV after the last step to the shard's owner."""
    host, inner = shifts[-1]
    return -host % sizes[0], -inner % sizes[1]
