"""What became of a model's gradients since the last step: made in a backward, changed, summed over the ring.

Gradients that are never summed, or are summed twice, or clipped by each rank's own norm before they are, train another model than
is meant, without an error. A few small parameters are witnesses for all.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ring_attn.sharding.reduction import local_part
from torch_bridge.job.sanity_checks import warn_or_raise

ADDED_TO = "a backward has added to sums over the ring"
CHANGED = "changed in place since the backward"
_WITNESSES = 4
_FORGOTTEN = (
    "the optimizer steps with the gradients of one rank's tokens: nothing has summed them over the ring since the last backward(), "
    "and the ranks' weights drift apart. Call cp.reduce_gradients() or ring_attn.sync_gradients(model, ring=ring) before the step"
)
_records = WeakIdKeyDictionary()  # by parameter


class _Witness:
    """One parameter's gradient: its version and size when the last backward had added to it, and the sum over the ring by which it
    was then replaced."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.clear()

    def clear(self) -> None:
        self.version: int | None = None
        self.size: Tensor | None = None
        self.sum: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    @property
    def pending(self) -> bool:
        """Whether a backward has made it, and nothing has summed it since."""
        return self.gradient is not None and self.version is not None

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since."""
        return self.pending and self.gradient is not None and self.gradient._version != self.version

    def made(self) -> None:
        if (gradient := self.gradient) is not None:
            self.version, self.size = gradient._version, _size(gradient)

    def summed(self) -> None:
        self.version, self.size, self.sum = None, None, self.gradient

    def factor(self) -> Tensor:
        """By what its size has been multiplied since the backward; 1 where nobody can tell."""
        if not self.changed or self.gradient is None or self.size is None:
            return torch.ones((), dtype=torch.float64)
        return (_size(self.gradient) / self.size).cpu().nan_to_num(1.0, 1.0, 1.0)


class GradientRecord:
    """The record of one model's gradients, from now on until :meth:`remove`. ``reduced_elsewhere``: something else,
    DistributedDataParallel, takes the mean over ranks of the ring."""

    def __init__(self, model: nn.Module) -> None:
        self.reduced_elsewhere = False
        self._added_to: list[Tensor] = []
        trained = sorted((x for x in model.parameters() if x.requires_grad), key=lambda x: x.numel())
        self._parameters = {id(x) for x in trained}
        self._witnesses = [_Witness(x) for x in trained[:_WITNESSES]]
        record = weakref.ref(self)
        self._handles: list[Any] = [register_optimizer_step_pre_hook(_before_step_of(record))]
        for parameter, witness in zip(trained, self._witnesses, strict=False):
            self._handles.append(parameter.register_hook(_before_adding_to(record, witness)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(_after_adding_to(witness)))
        for parameter in trained:
            _records[parameter] = self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in [x for x, record in _records.items() if record is self]:
            del _records[parameter]

    def story(self) -> str:
        """What became of the gradients since the backward, in words that ranks can compare; empty where nothing did."""
        if any(bool(added) for added in self._added_to):
            return ADDED_TO
        return CHANGED if any(witness.changed for witness in self._witnesses) else ""

    def factors(self) -> Tensor:
        """float64 ``[witnesses]``, by which gradients were multiplied: GradScaler takes one factor on all ranks."""
        return torch.stack([witness.factor() for witness in self._witnesses])

    def summed(self) -> None:
        """The gradients are sums over the ring now."""
        for witness in self._witnesses:
            witness.summed()
        self._added_to.clear()

    def clear(self) -> None:
        for witness in self._witnesses:
            witness.clear()
        self._added_to.clear()

    def before_adding(self, witness: _Witness) -> None:
        if witness.sum is not None and witness.gradient is witness.sum:
            self._added_to.append(witness.sum.detach().any())  # false where it was zeroed in place
            witness.sum = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(id(x) in self._parameters for group in optimizer.param_groups for x in group["params"]):
            return
        forgotten = not self.reduced_elsewhere and any(witness.pending for witness in self._witnesses)
        self.clear()
        if forgotten:
            warn_or_raise(_FORGOTTEN)


def records_of(parameters: Iterable[Tensor]) -> list[GradientRecord]:
    """The records of models that these parameters are of."""
    return list({id(record): record for x in parameters if (record := _records.get(x)) is not None}.values())


def _size(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(local_part(gradient).detach(), dtype=torch.float64)


# Hooks hold no record: torch keeps them for as long as a parameter, or for ever.
def _before_adding_to(record: "weakref.ref[GradientRecord]", witness: _Witness) -> Callable[[Tensor], None]:
    def before(gradient: Tensor) -> None:
        if (alive := record()) is not None:
            alive.before_adding(witness)

    return before


def _after_adding_to(witness: _Witness) -> Callable[[Tensor], None]:
    def after(parameter: Tensor) -> None:
        witness.made()

    return after


def _before_step_of(record: "weakref.ref[GradientRecord]") -> Callable[..., None]:
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (alive := record()) is not None:
            alive.before_step(optimizer)

    return before
