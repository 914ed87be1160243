"""Forward and backward over the keys' tour."""

from typing import Any

from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, Partial, Problem
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy
from jax_core.strategies.hierarchical.rotation import HostRotation, PairStep
from jax_core.strategies.pairs.local import LocalGradients, accumulate, kernel_of, open_backward, open_forward
from jax_core.strategies.pairs.partial_results import PartialResults
from jax_core.strategies.transfers.traffic import Traffic, rotated, sizes
from jax_core.strategies.visibility import visible_shifts


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
        sent, buffers = rotated(problem, len(shifts) - 1, backward)
        relayed = sizes(problem).keys + (2 * sizes(problem).sums if backward else 0)
        return Traffic(sent, buffers + (relayed if shifts[-1][0] else 0))

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        opened, continues = open_forward(spec, operands), kernel_of(spec).CONTINUES

        def compute(partials: PartialResults, step: PairStep) -> Partial:
            return opened.attend(step.pair, partials.carry if continues else None, step.last)

        def keep(partials: PartialResults, _: PairStep, result: Partial) -> tuple[PartialResults, None]:
            return partials.plus(result, continues, opened.wide), None

        rotation = HostRotation(spec, opened.operands, compute, keep, lambda partials: partials.merged(opened.wide))
        partials, *_ = rotation.run(PartialResults())
        return opened.close(partials.result(opened.last_dtype))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        opened = open_backward(spec, operands, out, lse, dout, dlse)

        def compute(sums: LocalGradients, step: PairStep) -> Grads:
            return opened.differentiate(step.pair, sums.dq)

        def keep(sums: LocalGradients, step: PairStep, grads: Grads) -> tuple[LocalGradients, tuple[Any, Any]]:
            return accumulate(sums, grads, step.pair.k_runs), (grads.dk, grads.dv)

        rotation = HostRotation(spec, opened.operands, compute, keep, lambda sums: sums)
        # Its first transfers must neither run beside the forward's nor be merged with them, which would keep what came until now.
        sums, dkv, send_home = rotation.run(opened.no_gradients(), after=opened.residuals.delta)
        assert dkv is not None
        return opened.close(dkv, sums, send_home)
