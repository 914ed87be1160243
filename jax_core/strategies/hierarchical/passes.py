"""Forward and backward over the keys' tour."""

from typing import Any

from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, Partial, Problem
from jax_core.strategies.contract import Operands, RingSpec, Strategy
from jax_core.strategies.hierarchical.schedule import visible_shifts
from jax_core.strategies.hierarchical.tour import Tour, Visit
from jax_core.strategies.local import LocalGradients, accumulate, kernel_of, open_backward, open_forward
from jax_core.strategies.partials import MOST_APART, Found, joined, only
from jax_core.strategies.traffic import Traffic, rotated, sizes


class Hierarchical(Strategy):
    """A ring of hosts around rings of ranks."""

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        if len(problem.sizes) != 2:
            return f"it needs two mesh axes, the first between hosts and the second within a host; got {len(problem.sizes)}"
        return None

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        """Beside a rotation there is room for the keys, and for two sums, of the next host."""
        hosts, ranks = problem.sizes
        shifts = visible_shifts(problem.scores.mask, problem.layout, (hosts, ranks), problem.q_length, problem.k_length)
        sent, held = rotated(problem, len(shifts) - 1, backward)
        relayed = sizes(problem).keys + (2 * sizes(problem).sums if backward else 0)
        return Traffic(sent, held + (relayed if shifts[-1][0] else 0))

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        opened, continues = open_forward(spec, operands), kernel_of(spec).CONTINUES

        def visit(found: Found, visit: Visit) -> Partial:
            return opened.attend(visit.pair, found.carry if continues else None, visit.last)

        def keep(found: Found, _: Visit, result: Partial) -> tuple[Found, None]:
            apart = Found(result, ()) if continues else Found(found.carry, (*found.apart, result))
            return joined(apart, opened.wide, MOST_APART), None

        found, *_ = Tour(spec, opened.operands, visit, keep, lambda found: joined(found, opened.wide)).make(Found(None, ()))
        return opened.close(only(joined(found, opened.last_dtype)))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        opened = open_backward(spec, operands, out, lse, dout, dlse)

        def visit(sums: LocalGradients, visit: Visit) -> Grads:
            return opened.differentiate(visit.pair, sums.dq)

        def keep(sums: LocalGradients, visit: Visit, grads: Grads) -> tuple[LocalGradients, tuple[Any, Any]]:
            return accumulate(sums, grads, visit.pair.k_runs), (grads.dk, grads.dv)

        tour = Tour(spec, opened.operands, visit, keep, lambda sums: sums)
        # Its first transfers must neither run beside the forward's nor be merged with them, which would keep what came until now.
        sums, dkv, send_home = tour.make(opened.no_gradients(), after=opened.residuals.delta)
        return opened.close(dkv, sums, send_home)
