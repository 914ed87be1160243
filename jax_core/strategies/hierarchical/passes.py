"""Forward and backward over the keys' tour."""

from jax import Array

from jax_core.strategies.contract import Operands, RingSpec
from jax_core.strategies.hierarchical.tour import Tour, Visit
from jax_core.strategies.local import LocalGradients, accumulate, kernel_of, open_backward, open_forward
from jax_core.strategies.partials import MOST_APART, Found, joined, only


def forward(spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
    """As the contract says."""
    opened, continues = open_forward(spec, operands), kernel_of(spec).CONTINUES

    def visit(found: Found, visited: Visit) -> tuple[Found, None]:
        carry = found.carry if continues else None
        result = opened.attend(visited.pair, carry, visited.diagonal, visited.last)
        if continues:
            return Found(result, ()), None
        return joined(Found(found.carry, (*found.apart, result)), opened.wide, MOST_APART), None

    found, _ = Tour(spec, opened.operands, visit, lambda found: joined(found, opened.wide)).make(Found(None, ()))
    return opened.close(only(joined(found, opened.last_dtype)))


def backward(spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None) -> Operands:
    """As the contract says."""
    opened = open_backward(spec, operands, out, lse, dout, dlse)

    def visit(sums: LocalGradients, visited: Visit) -> tuple[LocalGradients, tuple]:
        grads = opened.differentiate(visited.pair, sums.dq, visited.diagonal)
        return accumulate(sums, grads, visited.pair.shards[-1]), (grads.dk, grads.dv)

    tour = Tour(spec, opened.operands, visit, lambda sums: sums)
    # Its first transfers must neither run beside the forward's nor be merged with them, which would keep what came until now.
    sums, (dk, dv) = tour.make(opened.no_gradients(), after=opened.residuals.delta)
    return opened.close(dk, dv, sums)
