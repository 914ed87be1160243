"""A state space model by an operator of torch's, as mamba_ssm's. ``M`` and ``E`` of a piece are sums over its tokens, and so is
what its output tells of the state that enters: the operator is called once, from that state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jax_core.recurrence.chunks import least_decay
from ring_attn.recurrence.documents import Documents
from ring_attn.recurrence.pieces import Operator, Recorded, Tensors, checked
from ring_attn.recurrence.sums import weighted_over_tokens
from torch_bridge.recurrence.operation import accumulation


class BySums:
    """Of ``x, dt, A, B, C, D``. The operator's states are ``[pieces, heads, head_dim, state_dim]``."""

    def __init__(self, operator: Operator, chunk: int, documents: Documents | None) -> None:
        self.operator, self.chunk, self.documents = operator, chunk, documents
        self._recorded: Recorded | None = None

    def maps(self, operands: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        x, dt, a, b, _, _ = operands
        with torch.autocast(x.device.type, enabled=False):
            times, decays = _of_tokens(x, dt, a)
            weights = (decays.flip(-1).cumsum(-1).flip(-1) - decays).exp() * times
            m = decays.sum(-1).exp()
            if self.documents is not None:
                weights = weights * (self.documents.number == self.documents.last[:, None])[:, None]
                m = m * (self.documents.first == self.documents.last)[:, None]
            return m, weighted_over_tokens(b.to(x.dtype), x, weights), operands

    def output(self, kept: Tensors, entering: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensors]:
        # A checkpoint would compute a graph within its graph a third time: there, and for other hooks, the backward calls again.
        if not any(wanted) or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return self.computed(*kept, state=entering.mT)[0], kept
        self._recorded = self._record(kept, entering, wanted)
        return self._recorded.results[0].detach(), kept

    def back_to_state(self, kept: Tensors, entering: Tensor, dy: Tensor) -> tuple[Tensor, Tensors]:
        x, dt, a, _, c, _ = kept
        with torch.autocast(x.device.type, enabled=False):
            weights = _of_tokens(x, dt, a)[1].cumsum(-1).exp()
            if self.documents is not None:
                weights = weights * (self.documents.number == self.documents.first[:, None])[:, None]
            return weighted_over_tokens(c.to(x.dtype), dy.to(x.dtype), weights), kept

    def back_to_operands(
        self, kept: Tensors, entering: Tensor, dy: Tensor, dleft: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        recorded = self._recorded or self._record(kept, entering, wanted)
        self._recorded = None  # and with it what it holds for its backward; a second one computes it again
        return recorded.gradients(dy, dleft.mT)

    def computed(self, *operands: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(y, state)`` of each piece by itself: the one that leaves it, for the one that enters its first document."""
        x, dt, a, b, c, d = operands
        assert x is not None and b is not None
        of = self.documents
        more: dict[str, Any] = {} if of is None else {"seq_idx": (of.number - of.first[:, None]).to(torch.int32)}
        options = {"D": d, "initial_states": state, "return_final_states": True}
        y, left = self.operator(x, dt, a, b, c, self.chunk, **options, **more)
        return checked(y, x, (x.shape[0], *x.shape[2:], b.shape[-1]), left)

    def _record(self, operands: Tensors, entering: Tensor, wanted: Sequence[bool]) -> Recorded:
        return Recorded(lambda *leaves: self.computed(*leaves, state=entering.mT), operands, wanted)


def _of_tokens(x: Tensor, dt: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Times, and log decays, ``[pieces, heads, tokens]``: along the last dim a cumsum is some 100 times as fast."""
    times = dt.to(accumulation(x.dtype)).transpose(1, 2).contiguous()
    return times, (times * a.to(times.dtype)[:, None]).clamp_min_(least_decay(torch.finfo(times.dtype).tiny))
