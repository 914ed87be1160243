"""``ring_attn.verify``."""

from collections.abc import Callable

from torch import nn

from ring_attn.ring import Ring
from ring_attn.verification.model import Batch, Forward, verify_model
from ring_attn.verification.step import verify_step
from ring_attn.verification.verdict import Verdict


def verify(
    model: nn.Module | None = None,
    batch: Batch | None = None,
    *,
    step: Callable[..., object] | None = None,
    ring: Ring | None = None,
    forward: Forward | None = None,
) -> Verdict:
    """Compares your training step, or your model, on the ring with the same in one process, by the result.

    ``verify(step=step, ring=ring)``: ``step(ring)`` makes model and optimizer from one seed, makes two steps of training with the
    ring that it is given (forward, loss, backward, the sum over the ring, clipping, the optimizer), and returns the model (or
    several modules, in a list or a dict). It runs on the ring, and again in each process by itself: there every ring of these ranks
    has one process, ``ring.size`` is 1, and where the ring is the whole job so is torch's default group: ``dist.get_world_size()``
    and ``WORLD_SIZE`` are 1. What the optimizer is given at each step and what becomes of the parameters must be the same.

    ``verify(model, batch, ring=ring)``: the loss, the logits and every gradient of a model, as it is but in evaluation mode;
    neither it nor its gradients are changed. ``batch``: token ids ``[batch, seq]``, or what :meth:`Ring.shard_batch` takes, by
    name; the whole, the same on all ranks. The model gets this rank's ``input_ids``, and ``position_ids`` and ``segment_ids`` where
    its ``forward`` has such arguments, and gives logits. For any other model, ``forward(model, batch, ring)`` gives this rank's
    share of the loss.

    Collective of the job. Random numbers are the same in both runs; ``nn.functional.dropout`` is left out in both. Where half
    precision is computed in, differences below 5 % are rounding; else below 0.1 %.

    Returns a :class:`Verdict`, the same on all ranks of the ring: ``print`` it; ``.ok`` is for tests. It is not ok either where
    there is nothing to compare: a ring of one process, a step that goes over no ring or another one, or that is not repeatable.

    Raises ValueError for both or neither of step and model, a step that returns no module, and what the step or the model raises.
    """
    if (step is None) == (model is None) or (model is not None and batch is None):
        raise ValueError("verify takes either step=, a function of the ring, or a model and a batch")
    ring = Ring() if ring is None else ring
    if ring.size == 1:
        return _of_one_process(model if step is None else step)
    if step is not None:
        return verify_step(step, ring)
    assert model is not None and batch is not None
    return verify_model(model, batch, ring, forward)


def _of_one_process(what: object) -> Verdict:
    reason = (
        "nothing was compared: the ring has one process. Start several (torchrun), or take the mesh dimension that the sequence is "
        "sharded over: sizes or names of the mesh may be swapped"
    )
    return Verdict(getattr(what, "__name__", type(what).__name__), {}, None, [reason])
