"""Whether gradients hold sums over a ring already, which a second sum would count again.

What a gradient is travels with it: a tensor that was summed carries the ring and its version then, until it is replaced. A few
small parameters are witnesses of the backwards that have added to such sums. What else may have become of gradients (own
collectives, noise, rows that were zeroed) nobody can tell from them, and nothing is said of it.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ring_attn.sharding.reduction import local_part
from torch_bridge.job.mesh import ProcessRing

_MARK = "ring_attn_summed"  # the attribute of a gradient: the global ranks of the ring, and its version when it was their sum
_WITNESSES, _VALUES = 4, 64


class Story(NamedTuple):
    """What this rank can be sure of: its gradients are untouched since they were summed; only backwards have added to them."""

    summed: bool = False
    added_to: bool = False


class _Witness:
    """One parameter: some values of its gradient when it was summed, and the backwards that have added to it since."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.backwards = 0
        self.was_more_than_zero: Tensor | None = None

    def summed(self, gradient: Tensor) -> None:
        self.values, self.backwards, self.was_more_than_zero = _some_values(gradient), 0, None

    def before_backward(self, gradient: Tensor | None) -> None:
        self.backwards += 1
        if self.backwards == 1 and gradient is not None:
            self.was_more_than_zero = _some_values(gradient).any()  # `.data.zero_()` is seen in no version

    def untouched(self, gradient: Tensor) -> bool:
        """Whether the sum is there still, and not zero. The host waits for it."""
        now = _some_values(gradient)
        return self.values is not None and bool(now.any()) and torch.equal(now, self.values)


_witnesses = WeakIdKeyDictionary()  # by parameter


def note_sums(parameters: list[Tensor], ring: ProcessRing) -> None:
    """The gradients of these parameters are sums over ``ring`` now."""
    pairs = _with_gradients(parameters)
    for _, gradient in pairs:
        setattr(gradient, _MARK, (ring.ranks, gradient._version))
    for parameter, gradient in sorted((pair for pair in pairs if pair[0].is_leaf), key=lambda pair: pair[0].numel())[:_WITNESSES]:
        _witness(parameter).summed(gradient)


def story(parameters: list[Tensor], ring: ProcessRing) -> Story:
    """What has become of sums over ``ring``, if the gradients of all these parameters are such."""
    pairs = _with_gradients(parameters)
    marks: list[tuple[Any, int]] = [getattr(gradient, _MARK, (None, 0)) for _, gradient in pairs]
    if any(ranks != ring.ranks for ranks, _ in marks):
        return Story()
    changes = [gradient._version - version for (_, gradient), (_, version) in zip(pairs, marks, strict=True)]
    witnesses = [(_witnesses[x], gradient, change) for (x, gradient), change in zip(pairs, changes, strict=True) if x in _witnesses]
    if not any(changes):
        return Story(summed=any(witness.untouched(gradient) for witness, gradient, _ in witnesses))
    backwards = max((witness.backwards for witness, *_ in witnesses), default=0)
    by_them = max(changes) <= backwards and all(change == witness.backwards for witness, _, change in witnesses)
    return Story(added_to=by_them and any(bool(witness.was_more_than_zero) for witness, *_ in witnesses))


def _with_gradients(parameters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.grad) for x in parameters if x.grad is not None]


def _witness(parameter: Tensor) -> _Witness:
    if parameter not in _witnesses:
        _witnesses[parameter] = witness = _Witness()
        parameter.register_hook(_before_backward(weakref.ref(parameter), witness))
    record: _Witness = _witnesses[parameter]
    return record


def _before_backward(parameter: "weakref.ref[Tensor]", witness: _Witness) -> Callable[[Tensor], None]:
    def before(_: Tensor) -> None:
        if (alive := parameter()) is not None:
            witness.before_backward(alive.grad)

    return before


def _some_values(gradient: Tensor) -> Tensor:
    return local_part(gradient.detach()).flatten()[:_VALUES].clone()
