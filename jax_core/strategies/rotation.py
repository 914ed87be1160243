"""The steps of a rotation, and running them so that equal ones are one loop."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

from jax import lax

from jax_core.strategies.contract import RingSpec

State = TypeVar("State")


class Step(NamedTuple):
    """One step of a ring: the rank's queries attend to the current K/V shard.

    ``hop_in``: how many ranks K/V moved since the previous step (0 at the diagonal step, which is the first); their gradients now
    follow by as many. ``hop_out``: how many ranks they move before the next step (0 at the last).
    """

    hop_in: int
    hop_out: int


def steps(shifts: Sequence[int]) -> list[Step]:
    """Of the ascending ``shifts`` at which a rank computes."""
    hops = [after - before for before, after in pairwise(shifts)]
    return [Step(hop_in, hop_out) for hop_in, hop_out in zip([0, *hops], [*hops, 0], strict=True)]


def run_steps(
    spec: RingSpec,
    run_step: Callable[..., State],
    settle: Callable[[State], State],
    state: State,
    schedule: Sequence[NamedTuple],
) -> State:
    """The state after all steps. Consecutive equal steps (all but the first and the last, if there are no gaps) are one loop: XLA
    then cannot run all rotations before the kernels, which would overlap nothing and hold every shard at once, and the program does
    not grow with the ring. ``run_step(state, step=)`` gives the next state; ``settle`` gives a state the form that it has at the
    end of the loop's body."""
    for step, equal in groupby(schedule):
        unroll = 1 if spec.problem.backend == "cpu" else 2
        state = _repeat(partial(run_step, step=step), settle, state, len(list(equal)), unroll)
    return state


def _repeat(run_step: Callable[[State], State], settle: Callable[[State], State], state: State, count: int, unroll: int) -> State:
    """``unroll``: with two steps in the body, two buffers alternate; with one, arrivals are copied to where the next step reads."""
    outside = count if count <= unroll else count % unroll
    for _ in range(outside):
        state = run_step(state)
    if count == outside:
        return state

    def body(state: State, _: object) -> tuple[State, None]:
        for _ in range(unroll):
            state = run_step(state)
        return settle(state), None

    return lax.scan(body, settle(state), length=(count - outside) // unroll)[0]
