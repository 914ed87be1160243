"""What a comparison found, and what counts as equal."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCE = 1e-3  # relative; right programs are within 3e-4, wrong ones off by 1e-2 and more
HALF_TOLERANCE = 5e-2  # where anything was computed in half precision
ROUNDING = 1e-5
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found; printed, it is a report. The same on all ranks of the ring.

    ``tried``: what was compared. ``errors``: the largest error of each thing that was, relative to its largest value in one
    process. ``first``: the first module that differs, in words; None where none does, or where modules are not compared.
    ``reasons``: what is wrong, as far as can be told.
    """

    tried: str
    errors: dict[str, float]
    first: str | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the ring gives what one process gives."""
        return not self.reasons

    def __str__(self) -> str:
        head = f"{'right' if self.ok else 'WRONG'}: {self.tried}"
        if self.errors:
            worst = max(self.errors, key=lambda name: (self.errors[name] != self.errors[name], self.errors[name]))
            head += f"; largest relative error {self.errors[worst]:.1e} ({worst})"
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """What rounding may make, where these are computed in."""
    return HALF_TOLERANCE if any(dtype in _HALF for dtype in dtypes) else TOLERANCE


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def relative(actual: Tensor, expected: Tensor) -> float:
    return largest(actual - expected) / max(largest(expected), 1e-6)
