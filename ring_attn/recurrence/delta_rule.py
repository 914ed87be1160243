"""A delta rule by an operator of torch's of which nothing is known but its results.

One call tells all of a piece: for values ``[v | 0]`` and the state ``[0 | I]`` it returns ``[y_0 | P]`` and ``[E | M]``, and ``y =
y_0 + P S_in``. The operator is called once more in the backward, from ``S_in``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jax_core.recurrence.operators import EPSILON
from ring_attn.recurrence.documents import Documents
from ring_attn.recurrence.pieces import Operator, Recorded, Tensors, checked
from ring_attn.recurrence.sums import over_tokens
from torch_bridge.recurrence.operation import accumulation


@dataclass(frozen=True)
class ByWideCall:
    """Of ``q, k, v, g, beta``."""

    operator: Operator
    documents: Documents | None

    def maps(self, operands: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        q, k, v, g, beta = operands
        (pieces, _, heads, value_dim), key_dim = v.shape, k.shape[-1]
        unit = torch.eye(key_dim, dtype=accumulation(v.dtype), device=v.device).expand(pieces, heads, key_dim, key_dim)
        y, left = self.computed(q, k, F.pad(v, (0, key_dim)), g, beta, state=F.pad(unit, (value_dim, 0)))
        (local, reads), (e, m) = (x.split([value_dim, key_dim], -1) for x in (y, left))
        return m, e, (*operands, local, reads)

    def output(self, kept: Tensors, entering: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensors]:
        *operands, local, reads = kept
        if any(wanted):
            reads = reads.contiguous()  # what is saved is not to keep the whole wide output
        y = local.clone(memory_format=torch.contiguous_format)
        with torch.autocast(reads.device.type, enabled=False):
            for part, read, state in zip(y, reads, entering.to(reads.dtype), strict=True):  # together, they would be copied
                part.transpose(0, 1).baddbmm_(read.transpose(0, 1), state)
        return y, (*operands, reads)

    def back_to_state(self, kept: Tensors, entering: Tensor, dy: Tensor) -> tuple[Tensor, Tensors]:
        *operands, reads = kept
        return over_tokens(reads, dy.to(reads.dtype)), operands

    def back_to_operands(
        self, kept: Tensors, entering: Tensor, dy: Tensor, dleft: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        return Recorded(lambda *leaves: self.computed(*leaves, state=entering), kept, wanted).gradients(dy, dleft)

    def computed(self, *operands: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(y, state)`` of each piece by itself: the one that leaves it, for the one that enters its first document."""
        pieces, _, heads, value_dim = operands[2].shape
        shape = heads, operands[1].shape[-1], value_dim
        if self.documents is None:
            y, left = self.operator(*operands, initial_state=state, output_final_state=True)
            return checked(y, operands[2], (pieces, *shape), left)
        cu_seqlens = self.documents.cu_seqlens
        entering = None if state is None else self.documents.of_first(state)
        flat = [x.flatten(0, 1)[None] for x in operands]
        y, left = self.operator(*flat, initial_state=entering, output_final_state=True, cu_seqlens=cu_seqlens)
        y, left = checked(y, flat[2], (len(cu_seqlens) - 1, *shape), left)
        return y.view(operands[2].shape), left.index_select(0, self.documents.last)


def of_heads(x: Tensor, heads: int, normed: bool) -> Tensor:
    """Queries or keys, once for each head."""
    if normed:
        wide = x.to(accumulation(x.dtype))
        x = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
