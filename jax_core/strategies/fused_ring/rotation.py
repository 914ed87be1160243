"""How halves of shards are sent from HBM to a neighbour's HBM while the kernel computes, and who may write where, and when.

Each half has ``SLOTS`` buffers: at step ``s`` a rank works on slot ``s % 2`` and sends it into slot ``(s + 1) % 2`` of its
neighbour. It may write there once the neighbour has finished step ``s - 1`` and the neighbour's own copy out of that slot is
complete: the neighbour then gives a *credit* to the rank that sends to it. Three waits rule out races:

- *arrival*: no step reads a slot before the data sent to it has arrived (one semaphore per slot, since two may be in flight);
- *credit*: nothing is sent into a slot that is still being read (the first step needs none: its slots have not been used);
- *departure*: no credit is given before the outgoing copy has read the slot.

At the start neighbours wait for each other: a rank that has not entered the kernel yet has no buffers to write into. They meet at a
barrier semaphore. All calls share it, and it only counts: if a rank entered the next call while a neighbour still waited in this
one, its signal would be taken for the other neighbour's. So no rank leaves before both its neighbours have signalled that they are
past the barrier. At the end everything sent has arrived and all credits are spent, so all semaphores are 0.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.strategies.fused_ring.constants import SLOTS, Refs, RingConstants

HALVES = (0, 1)


def source(const: RingConstants, rank: Array, half: int, step: Array | int) -> Array:
    """The rank that owns the half held here at ``step``."""
    return lax.rem(rank + const.size - const.directions[half] * step, const.size)


def device(const: RingConstants, rank: Array) -> dict[str | tuple[str, ...], int | Array]:
    """The mesh coordinates of a rank of the ring. A ring over several mesh axes is numbered as by ``lax.axis_index``."""
    ids: dict[str | tuple[str, ...], int | Array] = {}
    for name, size in reversed(const.axes):
        ids[name], rank = lax.rem(rank, size), lax.div(rank, size)
    return ids


def meet(const: RingConstants, rank: Array, met: Ref) -> None:
    """Waits until both neighbours are in the kernel, then tells them that this rank is past the barrier."""
    barrier = pltpu.get_barrier_semaphore()
    _signal_neighbours(const, rank, barrier)
    pl.semaphore_wait(barrier, 2)
    _signal_neighbours(const, rank, met)


def part(met: Ref) -> None:
    """Waits until both neighbours are past the barrier."""
    pl.semaphore_wait(met, 2)


def _signal_neighbours(const: RingConstants, rank: Array, semaphore: Ref) -> None:
    for way in (1, -1):
        pl.semaphore_signal(semaphore, device_id=device(const, lax.rem(rank + const.size + way, const.size)))


class _Copy(Protocol):
    """To another device: Pallas's descriptor, whose class is private."""

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def wait_send(self) -> None: ...

    def wait_recv(self) -> None: ...


class RemoteTransfer(NamedTuple):
    """Buffers ``[half, slot, ...]`` that rotate together; semaphores ``sent [half]``, ``arrived [half, slot]``."""

    name: str
    const: RingConstants
    rank: Array
    buffers: tuple[Ref, ...]
    sent: Ref
    arrived: Ref

    def depart(self, step: Array) -> None:
        for copy in self._copies(step):
            copy.start()

    def wait_departed(self, step: Array) -> None:
        for copy in self._copies(step):
            copy.wait_send()

    def wait_arrived(self, step: Array) -> None:
        """Waits for the inputs of ``step``, which the neighbour sent one step earlier."""
        for copy in self._copies(step - 1):
            copy.wait_recv()

    def _copies(self, step: Array) -> Iterator[_Copy]:
        here, there = lax.rem(step, SLOTS), lax.rem(step + 1, SLOTS)
        for half in HALVES:
            to = device(self.const, lax.rem(self.rank + self.const.size + self.const.directions[half], self.const.size))
            for buffer in self.buffers:
                yield pltpu.make_async_remote_copy(
                    buffer.at[half, here], buffer.at[half, there], self.sent.at[half], self.arrived.at[half, there], to
                )


class ReturnTransfer(NamedTuple):
    """Sends the slots of the last step straight to the ranks that own the halves, into buffers ``[half, ...]`` that nothing else
    writes; semaphores ``sent [half]``, ``arrived [half]``."""

    const: RingConstants
    rank: Array
    buffers: tuple[Ref, ...]
    owners: tuple[Ref, ...]
    sent: Ref
    arrived: Ref

    def start(self) -> None:
        for copy in self._copies():
            copy.start()

    def wait(self) -> None:
        for copy in self._copies():
            copy.wait()

    def _copies(self) -> Iterator[_Copy]:
        last = self.const.hops
        for half in HALVES:
            owner = device(self.const, source(self.const, self.rank, half, last))
            for buffer, returned in zip(self.buffers, self.owners, strict=True):
                here, there = buffer.at[half, last % SLOTS], returned.at[half]
                yield pltpu.make_async_remote_copy(here, there, self.sent.at[half], self.arrived.at[half], owner)


def ring_semaphores() -> dict[str, pl.MemoryRef]:
    """For the neighbours' barrier, and for their credits."""
    return {"met": pltpu.SemaphoreType.REGULAR, "credit": pltpu.SemaphoreType.REGULAR((2,))}


def transfer_semaphores(name: str) -> dict[str, pl.MemoryRef]:
    return {f"{name}_sent": pltpu.SemaphoreType.DMA((2,)), f"{name}_arrived": pltpu.SemaphoreType.DMA((2, SLOTS))}


def transfer(name: str, const: RingConstants, rank: Array, refs: Refs, buffers: tuple[str, ...]) -> RemoteTransfer:
    """The transfer of those of ``buffers`` that this call has."""
    there = tuple(refs[buffer] for buffer in buffers if buffer in refs)
    return RemoteTransfer(name, const, rank, there, refs[f"{name}_sent"], refs[f"{name}_arrived"])


def wait_credits(credit: Ref) -> None:
    for half in HALVES:
        pl.semaphore_wait(credit.at[half])


def give_credits(const: RingConstants, rank: Array, credit: Ref) -> None:
    for half in HALVES:
        behind = lax.rem(rank + const.size - const.directions[half], const.size)
        pl.semaphore_signal(credit.at[half], device_id=device(const, behind))
