"""A model on the ring against the same model in one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ring_attn.ring import Ring
from ring_attn.sharding.sequence import ShardedBatch
from ring_attn.training.gradients import sync_gradients
from ring_attn.training.loss import cross_entropy, total_loss
from ring_attn.verification.modules import Seen, first_that_differs, token_mask, trimmed, watched
from ring_attn.verification.step import Comparison, compare
from ring_attn.verification.verdict import Verdict

Batch = Tensor | Mapping[str, Any]
Forward = Callable[[Any, Any, Ring], Tensor]

_LOSS, _LOGITS = "the loss", "the logits"
_OPTIONAL = ("position_ids", "segment_ids")


def verify_model(model: nn.Module, batch: Batch, ring: Ring, forward: Forward | None) -> Verdict:
    """See :func:`ring_attn.verify`."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "ring_attn":
        raise ValueError("this model is context-parallel: its ContextParallel compares it, cp.verify(batch)")
    runs: list[Seen] = []

    def step(ring: Ring) -> dict[str, object]:
        model.zero_grad()
        with watched(model) as seen:
            share, logits = _forward(model, batch, ring) if forward is None else (forward(model, batch, ring), None)
        runs.append(seen)
        share.backward()
        sync_gradients(model, ring=ring)
        return {"": model, _LOSS: total_loss(share, ring=ring)} | ({} if logits is None else {_LOGITS: logits})

    with _as_it_was(model):
        comparison = compare(step, ring)
    first = None
    if comparison.reasons and comparison.comparable:
        length = _tokens(batch).shape[1]
        sharded, whole = _unsharded(runs[0], ring, length), trimmed(runs[1], length)
        first = first_that_differs(sharded, whole, lambda x: token_mask(batch, x), comparison.allowed)
        comparison.reasons[:] = _reasons(comparison, first)
    tried = f"{type(model).__name__}, batch {list(_tokens(batch).shape)}, {ring.size} ranks, layout {ring.layout}{comparison.aside}"
    return Verdict(tried, comparison.errors, first, comparison.reasons)


def _forward(model: nn.Module, batch: Batch, ring: Ring) -> tuple[Tensor, Tensor]:
    """This rank's share of the loss, and the logits of the whole."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    shard = ring.shard_batch(**inputs)
    takes = signature(model.forward).parameters
    if "segment_ids" not in takes and _has_documents(inputs, shard):
        raise ValueError(
            f"{type(model).__name__}.forward takes no segment_ids, and the batch has documents or padding: give verify forward=, a "
            "function (model, batch, ring) that gives this rank's share of the loss, as your training does"
        )
    output = model(shard.input_ids, **{name: getattr(shard, name) for name in _OPTIONAL if name in takes})
    logits = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
    return cross_entropy(logits, shard), ring.unshard(logits.detach(), length=shard.length)


def _has_documents(inputs: Mapping[str, object], shard: ShardedBatch) -> bool:
    mask = inputs.get("attention_mask")
    padded = isinstance(mask, Tensor) and bool((mask == 0).any())
    return padded or inputs.get("segment_ids") is not None or bool((shard.segment_ids > 0).any())


def _tokens(batch: Batch) -> Tensor:
    tokens = batch if isinstance(batch, Tensor) else batch.get("input_ids")
    if isinstance(tokens, Tensor):
        return tokens
    return next(x for x in batch.values() if isinstance(x, Tensor) and x.ndim > 1)


def _unsharded(seen: Seen, ring: Ring, length: int) -> Seen:
    """Of what was made for a shard, the whole."""
    local = ring.positions(length).shape[0]
    return {name: ring.unshard(x, length=length) for name, x in seen.items() if x.ndim > 2 and x.shape[1] == local}


def _reasons(comparison: Comparison, first: str | None) -> list[str]:
    if _LOGITS in comparison.wrong:
        return [f"the logits differ; {first or 'no module differs before them'}"]
    if _LOSS in comparison.wrong:
        why = first or "no module differs: it is labelled or normalised in another way"
        return [f"the loss differs{' and the logits do not' if _LOGITS in comparison.errors else ''}; {why}"]
    right = "logits and loss are" if _LOGITS in comparison.errors else "the loss is"
    return [f"{right} right, and the backward is not: {reason}" for reason in comparison.reasons]


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Without dropout; at the end, its gradients, buffers and modes are what they were."""
    training = {module: module.training for module in model.modules()}
    gradients: dict[Tensor, Tensor | None] = {x: x.grad for x in model.parameters()}
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    for x in gradients:
        x.grad = None
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for x, gradient in gradients.items():
            x.grad = gradient
        for x, value in buffers:
            x.data.copy_(value)
