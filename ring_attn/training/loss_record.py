"""Whether the loss whose gradient reaches a model's logits was made over the ring: a mean over one rank's tokens has nearly the
right value, and a gradient that is wrong."""

import torch
from torch import Tensor

from torch_bridge.job.sanity_checks import warn_or_raise

_OWN_LOSS = (
    "the gradient of this sharded model's logits comes from no loss that was made over the ring: a mean over one rank's labels is "
    "not a share of the mean over all. Use the model's loss (labels in the batch), cp.loss(outputs, batch), or "
    "ring_attn.cross_entropy with reduction='sum', divided by the number of labels of all ranks"
)
_last = [-1]  # the backward that came through a loss of cross_entropy last, by torch's number of it


def note_made_over_the_ring(losses: Tensor) -> Tensor:
    """``losses``, of any shape, as they are."""
    if losses.requires_grad and not torch.compiler.is_compiling():
        losses.register_hook(_came_by)
    return losses


def watch_logits(logits: object) -> None:
    """Warn once where the gradient of ``logits [batch, seq, vocabulary]`` comes from elsewhere."""
    if isinstance(logits, Tensor) and logits.requires_grad:
        logits.register_hook(_arrived)


def _came_by(_: Tensor) -> None:
    _last[0] = torch._C._current_graph_task_id()


def _arrived(_: Tensor) -> None:
    if _last[0] != torch._C._current_graph_task_id():
        warn_or_raise(_OWN_LOSS)
