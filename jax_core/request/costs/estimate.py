"""The time of a pass in closed form: every stage takes as long as its slowest rank and its slowest hop.

An upper bound of what ``simulation`` finds, and equal to it where one rank or one hop is the slowest at every stage, as in a causal
ring. In a ring that is no pessimism: all shards but one pass every link, so no number of buffers hides a slow link.
"""

from typing import NamedTuple

from jax_core.request.costs.machine import Machine
from jax_core.request.costs.plan import Stage, hop_times, ring_stages
from jax_core.request.costs.work import DIRECTIONS, Call


class Times(NamedTuple):
    """Seconds of a pass. ``device``: from its start to its end on the device, of which ``waiting`` is not the kernels': transfers
    not hidden, and compute that they take. ``host``: the host's work. Calls that follow one another overlap the two."""

    device: float
    waiting: float
    host: float

    @property
    def total(self) -> float:
        """Of one call among many."""
        return max(self.device, self.host)


def estimate(machine: Machine, platform: str, call: Call, direction: str) -> Times:
    """One pass of the ring, called from torch. Raises ValueError for a platform that was not measured."""
    stages = ring_stages(machine, platform, call, direction)
    device = sum(_stage_time(machine, call.size, stage) for stage in stages)
    computing = sum(float(stage.compute.max()) for stage in stages)
    costs = getattr(machine.kernels[platform], direction)
    return Times(device, device - computing, costs.host if call.size == 1 else costs.host_in_ring)


def both(machine: Machine, platform: str, call: Call) -> Times:
    """Forward and backward."""
    forward, backward = (estimate(machine, platform, call, direction) for direction in DIRECTIONS)
    return Times(*(sum(pair) for pair in zip(forward, backward, strict=True)))


def _stage_time(machine: Machine, size: int, stage: Stage) -> float:
    """While a transfer is under way, the kernels run at ``1 - sharing`` of their speed."""
    compute = float(stage.compute.max())
    sending = sum(float(hop_times(machine, size, send).max()) for send in stage.sends)
    return max(sending, compute + machine.sharing * sending)
