"""What every rank does, stage by stage, from the schedule that the strategy runs.

A stage is what XLA's loop makes of a step: work and transfers that begin together, and a next stage that begins when both are done.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jax_core.request.costs.machine import Machine, Pass
from jax_core.request.costs.work import Call, flop_per_score, seen
from jax_core.strategies.ring.schedule import visible_shifts
from jax_core.strategies.steps import Step, steps

GRADIENT_ITEMSIZE = 4  # dK and dV travel in float32, but for the way home


class Send(NamedTuple):
    """``bytes`` from every rank to the one ``hop`` after it."""

    bytes: float
    hop: int


class Stage(NamedTuple):
    """``compute``: seconds, per rank. ``sends``: one collective each, one after another; equal hops are one collective."""

    compute: np.ndarray
    sends: tuple[Send, ...] = ()


def ring_stages(machine: Machine, platform: str, call: Call, direction: str) -> list[Stage]:
    """One pass of ``strategies.ring``. ``direction``: "forward" or "backward".

    Raises ValueError for a platform whose figures the machine does not have.
    """
    if platform not in machine.kernels:
        raise ValueError(f"platform must be one of {', '.join(sorted(machine.kernels))}, which were measured; got {platform!r}")
    costs: Pass = getattr(machine.kernels[platform], direction)
    shifts, plan = _schedule(call)
    keys = float(call.batch * call.length * call.kv_heads * (call.dim + call.value_dim))
    backward = direction == "backward"
    stages = []
    for shift, step in zip(shifts, plan, strict=True):
        sends = [Send(keys * call.itemsize, step.hop_out)]
        sends += [Send(keys * GRADIENT_ITEMSIZE, step.hop_in)] if backward else []
        stages.append(Stage(_compute(machine, costs, call, direction, shift), _merged(sends)))
    if backward and shifts[-1]:  # dK and dV go home; nothing is computed meanwhile
        home = Send(keys * (call.home_itemsize or call.itemsize), call.size - shifts[-1])
        stages.append(Stage(np.zeros(call.size), (home,)))
    return stages


@lru_cache(maxsize=8192)  # a fit asks for the same calls many times
def _schedule(call: Call) -> tuple[tuple[int, ...], list[Step]]:
    shifts = visible_shifts(call.mask, call.layout, call.size, call.length, call.length)
    return shifts, steps(shifts)


def _compute(machine: Machine, costs: Pass, call: Call, direction: str, shift: int) -> np.ndarray:
    """Seconds of a step's kernels, per rank. (A kernel that computes a hidden pair of shards and drops it costs the ring nothing:
    there is always a rank that sees the pair of that step, and the others wait for it.)"""
    scores, cut = seen(call, shift)
    per_score = costs.product * flop_per_score(call, direction) + costs.score * call.batch * call.heads
    joined = costs.joined * call.batch * call.length * call.heads * call.dim / machine.memory if shift else 0.0
    return machine.sustained * per_score * (scores + costs.edge * cut) + costs.launch + joined


def _merged(sends: list[Send]) -> tuple[Send, ...]:
    """XLA makes one collective of what starts together and goes equally far."""
    by_hop: Counter[int] = Counter()
    for send in sends:
        by_hop[send.hop] += send.bytes  # type: ignore[assignment]  # a count may be a float
    return tuple(Send(size, hop) for hop, size in by_hop.items() if hop)


def hop_times(machine: Machine, size: int, send: Send) -> np.ndarray:
    """Seconds that the transfer out of each rank takes, once both of its ends have begun it."""
    ranks = np.arange(size)
    crosses = ranks // machine.host_size != (ranks + send.hop) % size // machine.host_size
    inside, between = (link.latency + send.bytes / link.bandwidth for link in (machine.inside, machine.between))
    return np.where(crosses, between, inside)
