"""Whether gradients hold sums over a ring already, which a second sum would count again.

A tensor that was summed is marked with the ring and its version then, until it is replaced. A few small parameters are sampled:
they count the backwards that have added to such sums. Other changes of a gradient (own collectives, noise, rows that were zeroed)
are not detected.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ring_attn.sharding.reduction import local_part
from torch_bridge.mesh.rings import ProcessRing

_MARK = "ring_attn_summed"  # the attribute of a gradient: the global ranks of the ring, and its version when it was their sum
_SAMPLES, _VALUES = 4, 64


class GradientState(NamedTuple):
    """What this rank can be sure of: its gradients are untouched since they were summed; only backwards have added to them."""

    summed: bool = False
    added_to: bool = False


class _Sample:
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


_sampled = WeakIdKeyDictionary()  # by parameter


def note_sums(parameters: list[Tensor], ring: ProcessRing) -> None:
    """The gradients of these parameters are sums over ``ring`` now."""
    pairs = _with_gradients(parameters)
    for _, gradient in pairs:
        setattr(gradient, _MARK, (ring.ranks, gradient._version))
    for parameter, gradient in sorted((pair for pair in pairs if pair[0].is_leaf), key=lambda pair: pair[0].numel())[:_SAMPLES]:
        _sample_of(parameter).summed(gradient)


def gradient_state(parameters: list[Tensor], ring: ProcessRing) -> GradientState:
    """What has become of sums over ``ring``, if the gradients of all these parameters are such."""
    pairs = _with_gradients(parameters)
    marks: list[tuple[tuple[int, ...] | None, int]] = [getattr(gradient, _MARK, (None, 0)) for _, gradient in pairs]
    if any(ranks != ring.ranks for ranks, _ in marks):
        return GradientState()
    changes = [gradient._version - version for (_, gradient), (_, version) in zip(pairs, marks, strict=True)]
    samples = [(_sampled[x], gradient, change) for (x, gradient), change in zip(pairs, changes, strict=True) if x in _sampled]
    if not any(changes):
        return GradientState(summed=any(sample.untouched(gradient) for sample, gradient, _ in samples))
    backwards = max((sample.backwards for sample, *_ in samples), default=0)
    by_them = max(changes) <= backwards and all(change == sample.backwards for sample, _, change in samples)
    return GradientState(added_to=by_them and any(bool(sample.was_more_than_zero) for sample, *_ in samples))


def _with_gradients(parameters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.grad) for x in parameters if x.grad is not None]


def _sample_of(parameter: Tensor) -> _Sample:
    if parameter not in _sampled:
        _sampled[parameter] = sample = _Sample()
        parameter.register_hook(_before_backward(weakref.ref(parameter), sample))
    known: _Sample = _sampled[parameter]
    return known


def _before_backward(parameter: "weakref.ref[Tensor]", sample: _Sample) -> Callable[[Tensor], None]:
    def before(_: Tensor) -> None:
        if (alive := parameter()) is not None:
            sample.before_backward(alive.grad)

    return before


def _some_values(gradient: Tensor) -> Tensor:
    return local_part(gradient.detach()).flatten()[:_VALUES].clone()
