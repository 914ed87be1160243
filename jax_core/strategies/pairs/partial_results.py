"""The results of a rank's pairs on their way to one: continued by the kernel, or merged a few at a time."""

from typing import NamedTuple

from jax.typing import DTypeLike

from jax_core.kernels.contract import Partial
from jax_core.kernels.merge import join

MAX_PENDING = 4  # a partial is an output in 16 bits


class PartialResults(NamedTuple):
    """The result so far: ``carry``, and the ``pending`` partials of later pairs that have not been merged with it."""

    carry: Partial | None = None
    pending: tuple[Partial, ...] = ()

    def plus(self, result: Partial, continued: bool, dtype: DTypeLike) -> "PartialResults":
        """With the result of one more pair, which has ``continued`` from the carry or is to be merged, in ``dtype``."""
        if continued:
            return PartialResults(result)
        more = PartialResults(self.carry, (*self.pending, result))
        return more.merged(dtype) if len(more.pending) == MAX_PENDING else more

    def merged(self, dtype: DTypeLike) -> "PartialResults":
        """With everything in ``carry``, its output in ``dtype``."""
        if not self.pending:
            return self
        first, *others = self.pending if self.carry is None else (self.carry, *self.pending)
        return PartialResults(join([first, *others], dtype) if others else first._replace(out=first.out.astype(dtype)))

    def result(self, dtype: DTypeLike) -> Partial:
        carry = self.merged(dtype).carry
        assert carry is not None
        return carry
