"""The steps of a ring inside a kernel: when it sends and when it waits; the same in the forward and the backward.

A step has one or more stages, each a computation on the current halves. A stage starts its transfer just before it computes, so
that the two overlap.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_core.strategies.fused_ring.constants import Refs, RingConstants
from jax_core.strategies.fused_ring.rotation import RemoteTransfer, ReturnTransfer, give_credits, meet, part, wait_credits


class Stage(NamedTuple):
    """``compute(step)`` runs during ``transfer``; at the last step, when nothing rotates, during ``last`` (may be None)."""

    transfer: RemoteTransfer
    compute: Callable[[Array], None]
    last: ReturnTransfer | None = None


def run_ring(const: RingConstants, rank: Array, refs: Refs, stages: Sequence[Stage]) -> None:
    """Runs all ``hops + 1`` steps, between the barriers with the neighbours at the start (``meet``) and at the end (``part``)."""
    meet(const, rank, refs["met"])

    def run_step(step: Array, _: int) -> int:
        rotates = step < const.hops
        _wait_for_arrivals(step, rotates, refs, stages)
        for stage in stages:
            _send(stage, step, rotates)
            stage.compute(step)
        _free_slots(const, rank, step, rotates, refs, stages)
        return 0

    lax.fori_loop(0, const.hops + 1, run_step, 0)
    for stage in stages:
        if stage.last is not None:
            stage.last.wait()
    part(refs["met"])


def _wait_for_arrivals(step: Array, rotates: Array, refs: Refs, stages: Sequence[Stage]) -> None:
    """Waits until this step's inputs have arrived and the neighbours' slots may be written."""

    @pl.when(step > 0)
    def _() -> None:
        for stage in stages:
            stage.transfer.wait_arrived(step)

    @pl.when((step > 0) & rotates)
    def _() -> None:
        wait_credits(refs["credit"])


def _send(stage: Stage, step: Array, rotates: Array) -> None:
    @pl.when(rotates)
    def _() -> None:
        stage.transfer.depart(step)

    if stage.last is not None:
        pl.when(jnp.logical_not(rotates))(stage.last.start)


def _free_slots(const: RingConstants, rank: Array, step: Array, rotates: Array, refs: Refs, stages: Sequence[Stage]) -> None:
    """Lets the neighbours write this step's slots once everything has been sent from them."""

    @pl.when(rotates)
    def _() -> None:
        for stage in stages:
            stage.transfer.wait_departed(step)

    @pl.when(step + 1 < const.hops)
    def _() -> None:
        give_credits(const, rank, refs["credit"])
