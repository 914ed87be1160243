"""How halves of shards travel from HBM to a neighbour's HBM while the kernel computes, and who may write where, when.

A buffer has ``SLOTS`` places for each half: at step ``s`` a rank works on place ``s % 2`` and sends it into place ``(s + 1) % 2``
of its neighbour. A rank may write there when the neighbour has done with it, that is when the neighbour has finished step ``s - 1``
and has itself sent the place on: it then gives a *credit* to the rank that sends to it. Three waits make this free of races:

- *arrival*: no step reads a place before what was sent to it is there (a semaphore for each place, since two may be under way);
- *credit*: nothing is sent into a place that is still read (none is needed for the first step, whose places are new);
- *departure*: no credit is given before what left the place has been read.

At the start neighbours on both sides wait for each other: a rank that is not in the kernel yet has no buffers to write into. They
meet at a semaphore that all calls share and that only counts, so a rank must not enter the next call, and be counted for another
neighbour, while one is still waiting in this: none leaves before both its neighbours have said that they have met theirs. At the
end all that was sent has arrived and all credits are spent, so that the semaphores are 0.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.plan import SLOTS, Plan

BOTH = (0, 1)


def source(plan: Plan, rank, half: int, step):
    """The rank whose half is here at ``step``."""
    return lax.rem(rank + plan.size - plan.directions[half] * step, plan.size)


def device(plan: Plan, rank) -> dict[str | tuple[str, ...], Any]:
    """The mesh coordinates of a rank of the ring: axes that split one ring are counted as ``lax.axis_index`` counts them."""
    found: dict[str | tuple[str, ...], Any] = {}
    for name, size in reversed(plan.axes):
        found[name], rank = lax.rem(rank, size), lax.div(rank, size)
    return found


def meet(plan: Plan, rank, met) -> None:
    """Waits until the neighbours on both sides are in the kernel, and tells them so."""
    barrier = pltpu.get_barrier_semaphore()
    _signal_neighbours(plan, rank, barrier)
    pl.semaphore_wait(barrier, 2)
    _signal_neighbours(plan, rank, met)


def part(met) -> None:
    """Waits until both neighbours have met theirs."""
    pl.semaphore_wait(met, 2)


def _signal_neighbours(plan: Plan, rank, semaphore) -> None:
    for way in (1, -1):
        pl.semaphore_signal(semaphore, device_id=device(plan, lax.rem(rank + plan.size + way, plan.size)))


class Freight(NamedTuple):
    """Buffers ``[half, slot, ...]`` that travel together; semaphores ``sent [half]``, ``arrived [half, slot]``."""

    name: str
    plan: Plan
    rank: jax.Array
    buffers: tuple[Any, ...]
    sent: Any
    arrived: Any

    def depart(self, step) -> None:
        for copy in self._copies(step):
            copy.start()

    def wait_departed(self, step) -> None:
        if self.plan.without != f"{self.name} departure":
            for copy in self._copies(step):
                copy.wait_send()

    def wait_arrived(self, step) -> None:
        """For what is worked on at ``step``, which left the neighbour a step before."""
        if self.plan.without != f"{self.name} arrival":
            for copy in self._copies(step - 1):
                copy.wait_recv()

    def _copies(self, step):
        here, there = lax.rem(step, SLOTS), lax.rem(step + 1, SLOTS)
        for half in BOTH:
            to = device(self.plan, lax.rem(self.rank + self.plan.size + self.plan.directions[half], self.plan.size))
            for buffer in self.buffers:
                yield pltpu.make_async_remote_copy(
                    buffer.at[half, here], buffer.at[half, there], self.sent.at[half], self.arrived.at[half, there], to
                )


def meeting_semaphores() -> dict[str, Any]:
    return {"met": pltpu.SemaphoreType.REGULAR, "credit": pltpu.SemaphoreType.REGULAR((2,))}


def freight_semaphores(name: str) -> dict[str, Any]:
    return {f"{name}_sent": pltpu.SemaphoreType.DMA((2,)), f"{name}_arrived": pltpu.SemaphoreType.DMA((2, SLOTS))}


def freight(name: str, plan: Plan, rank, refs: dict[str, Any], buffers: tuple[str, ...]) -> Freight:
    """Of those of ``buffers`` that there are."""
    there = tuple(refs[buffer] for buffer in buffers if buffer in refs)
    return Freight(name, plan, rank, there, refs[f"{name}_sent"], refs[f"{name}_arrived"])


def wait_credits(plan: Plan, credit) -> None:
    if plan.without != "credit":
        for half in BOTH:
            pl.semaphore_wait(credit.at[half])


def give_credits(plan: Plan, rank, credit) -> None:
    for half in BOTH:
        behind = lax.rem(rank + plan.size - plan.directions[half], plan.size)
        pl.semaphore_signal(credit.at[half], device_id=device(plan, behind))
