"""Gradients that are made a part of the tokens at a time, and summed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ring_attn.sharding.reduction import summed_in


def added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Their sum, in float32 where they are of 16 bits. None: of a parameter that no part used, as where there are no parts."""
    if total is None or gradient is None:  # the first is copied: autograd may hold it, too
        return total if gradient is None else gradient.to(summed_in(gradient.dtype), copy=True)
    return total.add_(gradient)


@contextmanager
def hooks_off(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of parameters (``register_hook``) get the gradient of all parts, in the backward, and not each part's before it."""
    hooked = [(x, hooks) for x in parameters if (hooks := x._backward_hooks)]
    for x, _ in hooked:
        x._backward_hooks = None
    try:
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


def unknown_leaf(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor | None:
    """A tensor that needs a gradient, of which the outputs are made and which is none of the inputs. Gradients are made of the
    inputs alone: it would get none in silence."""
    known = {id(x) for x in inputs}
    nodes = [x.grad_fn for x in outputs]
    seen = {x.grad_fn for x in inputs}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
        nodes.extend(following for following, _ in node.next_functions)
    return None
