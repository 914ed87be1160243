"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509) and its union with a ring (Fang and Zhao 2024, "USP", arXiv:2405.07719).

The ranks of one mesh axis, or of all, exchange heads for positions; what is then a shard of the sequence with fewer heads is
left to another strategy, over the remaining axis.
"""

from dataclasses import dataclass

from jax import Array

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.operands import Operands
from jax_core.strategies.contract import RingSpec, Strategy, make_residuals
from jax_core.strategies.pairs.rows import rank_of
from jax_core.strategies.pairs.shapes import SmallOperands, in_full_shape
from jax_core.strategies.transfers.traffic import Traffic, sizes
from jax_core.strategies.ulysses.heads import Exchange
from jax_core.strategies.ulysses.inside import exchanged_over, problem_inside, spec_inside, ulysses_axis, unsupported


@dataclass(frozen=True)
class Ulysses(Strategy):
    """``inner``: the strategy for what the exchange leaves. ``axis``: the place of the exchange's axis among the two of the ring;
    None: the exchange is over all axes."""

    inner: Strategy
    axis: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.axis is None else ("ulysses", "ring")[:: 1 if self.axis == 0 else -1]

    def unsupported(self, problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
        reason = unsupported(problem, self.axis)
        return reason or self.inner.unsupported(problem_inside(problem, self.axis), forward, backward)

    def default_params(self, problem: Problem) -> tuple[FwdParams, BwdParams]:
        """The inner strategy's, which depend on nothing that the exchange changes."""
        return self.inner.default_params(problem)

    def kernel_problem(self, problem: Problem) -> Problem:
        return self.inner.kernel_problem(problem_inside(problem, self.axis))

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        """Of both exchanges, and of the inner strategy."""
        inside, size = problem_inside(problem, self.axis), exchanged_over(problem, self.axis)
        nbytes = sizes(inside)  # as much as of all heads of a rank's shard, but for K/V heads that are repeated
        there, back = nbytes.queries + nbytes.keys, nbytes.out + nbytes.rows
        if backward:
            statistics = nbytes.rows * (2 if "lse_gradient" in problem.features else 1)
            there, back = there + 2 * nbytes.out + statistics, there
        sent, buffers = self.inner.traffic(inside, backward)
        return Traffic(sent + (there + back) * (size - 1) // size, buffers + there + back)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        operands, _ = in_full_shape(spec, operands)
        exchange, inside = self._exchange(spec, operands), spec_inside(spec, self.inner, self.axis)
        out, lse = self.inner.forward(inside, exchange.operands(operands))
        return exchange.results(out, lse)

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        full, to_given_shape = in_full_shape(spec, operands)
        exchange, inside = self._exchange(spec, full), spec_inside(spec, self.inner, self.axis)
        # Not before the forward is over: its exchange of the same arrays would be merged with this one, and its result kept.
        after = make_residuals(out, lse, dout, None).delta
        arrived, results = exchange.operands_and_results(full, (out, lse, dout, dlse if spec.lse_gradient else None), after)
        grads = self.inner.backward(inside, arrived, *results)
        query, key, value, bias = exchange.gradients(full, grads)
        sinks = exchange.to_all_heads(full.softmax_aux, grads.softmax_aux, 0)
        slopes = exchange.to_all_heads(full.alibi_slopes, grads.alibi_slopes, 1)
        small = to_given_shape(SmallOperands(sinks, bias, slopes))
        return grads._replace(query=query, key=key, value=value, **small._asdict())

    def _exchange(self, spec: RingSpec, operands: Operands) -> Exchange:
        at = ulysses_axis(spec, self.axis, rank_of(spec, operands))
        return Exchange(spec, operands, *at)
