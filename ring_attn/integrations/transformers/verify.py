"""``cp.verify``: a model on the ring against the same model in one process, in float32, and where they part.

Both get the same whole batch. Every module's inputs and outputs are compared in the order in which they are made, so the first that
differ say which layer is wrong: one whose input is right and whose output is not mixes tokens in a way that is not known here.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ring_attn.integrations.transformers.batch import MARK
from ring_attn.integrations.transformers.documents import PACKING, documents_of
from ring_attn.integrations.transformers.sequence import IGNORED
from ring_attn.ring import Ring
from ring_attn.training.loss import total_loss

LARGEST = 2**31  # bytes of float32 parameters of which a process holds a copy
TOLERANCE = 1e-3  # relative; right models are within 3e-4, wrong ones off by 1e-2 and more
_ROUNDING = 1e-5

LossOf = Callable[[Any, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What :meth:`ContextParallel.verify` found; printed, it is a report. The same on all ranks.

    ``errors``: the largest error of the loss, of the logits where a token is, and of each parameter's gradient, relative to the
    largest value on one process. ``first``: the first module that differs, in words; None where none does. ``reasons``: what is
    wrong, as far as can be told. ``tried``: which model and tokens.
    """

    tried: str
    errors: dict[str, float]
    first: str | None
    reasons: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the ring gives what one process gives."""
        return not self.reasons

    def __str__(self) -> str:
        worst = max(self.errors, key=self.errors.__getitem__)
        figures = f"largest relative error {self.errors[worst]:.1e} ({worst})"
        if self.ok:
            return f"right: {self.tried}; {figures}"
        return "\n".join([f"WRONG: {self.tried}; {figures}", *(f"- {reason}" for reason in self.reasons)])


class _Run(NamedTuple):
    """One side: the loss of all, logits ``[batch, seq, vocabulary]``, gradients by parameter, and modules' tensors in their order,
    whole sequences ``[batch, seq, ...]`` on both sides."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]
    seen: dict[str, Tensor]


def verify(context: Any, batch: Mapping[str, Any], loss: LossOf | None, make: Callable[[nn.Module], Any]) -> Verdict:
    """See :meth:`ContextParallel.verify`. ``make``: the context-parallel twin of a model that is not."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ValueError("verify compares losses and gradients: the batch needs labels [batch, seq]")
    twin, tried = _twin(context)
    run = partial(twin, use_cache=False) if context.plan.takes("use_cache") else twin
    whole = _in_one_process(twin, run, batch)
    alone = _documents_apart(run, batch, whole)
    parallel = make(twin)
    try:
        ring = _on_the_ring(parallel, batch, loss)
        leaks = _leaks(parallel, batch)
    finally:
        parallel.remove()
    rows = f"{tried}, batch {list(labels.shape)}, {context.ring.size} ranks, layout {context.ring.layout}"
    expected = whole if alone is None else whole._replace(logits=alone)
    return _verdict(rows, batch, expected, ring, leaks, by_itself=alone is not None, ring_size=context.ring.size)


def _twin(context: Any) -> tuple[Any, str]:
    """A float32 copy of the model as it was before, without dropout. Of one that is too large, the same with fewer layers of the
    same kinds; of one that is not here (FSDP's shards, meta tensors, quantised weights), one with other weights."""
    model: Any = context.model
    parameters = list(model.parameters())
    elsewhere = any(hasattr(x, "device_mesh") or x.device.type == "meta" or not x.is_floating_point() for x in parameters)
    large = 4 * sum(x.numel() for x in parameters) > LARGEST
    kind = type(model).__name__
    if not elsewhere and not large:
        with context.detached():
            return copy.deepcopy(model).float().eval(), kind
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    if large:
        text.num_hidden_layers = min(layers, _layers_of_all_kinds(text))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    config._attn_implementation = context.previous
    device = parameters[0].device if parameters[0].device.type != "meta" else torch.device("cpu")
    with torch.random.fork_rng():  # the same weights on all ranks, and the caller's random numbers as they were
        torch.manual_seed(0)
        twin = type(model)(config).float().eval().to(device)
    return twin, f"{kind} with {text.num_hidden_layers} of its {layers} layers, random weights"


def _layers_of_all_kinds(config: Any) -> int:
    kinds = getattr(config, "layer_types", None) or []
    return max(2, max((kinds.index(kind) + 1 for kind in set(kinds)), default=2))


def _in_one_process(model: nn.Module, run: Callable[..., Any], batch: Mapping[str, Any]) -> _Run:
    model.zero_grad()
    with _watched(model) as seen:
        outputs = run(**batch)
    outputs.loss.backward()
    return _Run(outputs.loss.detach(), outputs.logits.detach(), _gradients(model), seen)


def _on_the_ring(parallel: Any, batch: Mapping[str, Any], loss: LossOf | None) -> _Run:
    model, ring = parallel.model, parallel.ring
    model.zero_grad()
    sharded = parallel.shard(batch)
    sequences = sharded[MARK].sequences
    decoder = sequences["decoder"]
    with _watched(model) as local:
        outputs = model(**sharded)
    share = outputs.loss if loss is None else loss(outputs, sharded)
    share.backward()
    parallel.reduce_gradients()
    lengths = {x.local: x.length for x in sequences.values()}
    seen = {name: _whole(x, ring, lengths, decoder.batch) for name, x in local.items()}
    logits = ring.unshard(outputs.logits.detach(), length=decoder.length)
    value = share.detach() if loss is None else total_loss(share, ring=ring)
    return _Run(value, logits, _gradients(model), {name: x for name, x in seen.items() if x is not None})


def _whole(tensor: Tensor, ring: Ring, lengths: dict[int, int], rows: int) -> Tensor | None:
    if tensor.ndim < 3 or tensor.shape[0] != rows or tensor.shape[1] not in lengths:
        return None
    return ring.unshard(tensor, length=lengths[tensor.shape[1]])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.detach().clone() for name, x in model.named_parameters() if x.grad is not None}


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The first tensor that each module got and returned, by its name, in the order of the events. Modules that run more than once
    are left out: ranks may call them in another order, as Gemma 4 its rotary embedding, in that of a set of strings."""
    seen: dict[str, Tensor] = {}
    again: set[str] = set()
    handles = []

    def keep(name: str, tensor: Tensor) -> None:
        if name in seen:
            again.add(name)
        seen[name] = tensor.detach()

    for name, module in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            first = next((x for x in (*args, kwargs.get("hidden_states")) if isinstance(x, Tensor)), None)
            if first is not None and first.is_floating_point():
                keep(f"what {name} gets", first)

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            first = output if isinstance(output, Tensor) else next(iter(output), None) if isinstance(output, tuple) else None
            if isinstance(first, Tensor) and first.is_floating_point():
                keep(name, first)

        if name:
            handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for name in again:
            del seen[name]


# ---------------------------------------------------------------------------------------------------- documents


def _ids(batch: Mapping[str, Any]) -> Tensor | None:
    """Each token's document ``[batch, seq]``; None without packed documents."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        return None
    packing = {name: batch[name] for name in PACKING if name in batch}
    return documents_of(tokens, batch.get("attention_mask"), batch.get("position_ids"), packing)[0]


def _changed_in_the_first(batch: Mapping[str, Any], ids: Tensor) -> dict[str, Any]:
    """The batch with other tokens in the first document of each row."""
    tokens, first = batch["input_ids"], ids == ids[:, :1]
    return {**batch, "input_ids": torch.where(first, tokens.flip(1).roll(1, 0), tokens)}


@torch.no_grad()
def _leaks(parallel: Any, batch: Mapping[str, Any]) -> bool:
    """Whether other tokens in the first document move another's logits on the ring: by a bit, or, where experts multiply the tokens
    of all documents together, by more than the order of their sums can."""
    ids = _ids(batch)
    if ids is None:
        return False

    def logits(given: Mapping[str, Any]) -> Tensor:
        return parallel.ring.unshard(parallel.model(**parallel.shard(given)).logits, length=ids.shape[1])

    before, after = logits(batch), logits(_changed_in_the_first(batch, ids))
    experts = any(getattr(parallel.plan.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    allowed = _ROUNDING * _largest(before) if experts else 0.0
    moved = (before - after).abs().amax(-1) > allowed
    return bool((moved & (ids != ids[:, :1])).any())


@torch.no_grad()
def _documents_apart(run: Callable[..., Any], batch: Mapping[str, Any], whole: _Run) -> Tensor | None:
    """The logits of each document by itself, where the model in one process does not keep packed documents apart: then its own
    logits are no measure. None where they are."""
    ids = _ids(batch)
    if ids is None or "input_ids" not in batch:
        return None
    changed = {name: x for name, x in _changed_in_the_first(batch, ids).items() if name != "labels"}
    moved = (run(**changed).logits - whole.logits).abs().amax(-1)
    if _largest(moved[ids != ids[:, :1]]) <= TOLERANCE:
        return None
    alone = torch.zeros_like(whole.logits)
    for row in range(ids.shape[0]):
        for document in ids[row].unique():
            places = (ids[row] == document).nonzero().flatten()
            alone[row, places] = run(input_ids=batch["input_ids"][row, places][None]).logits[0]
    return alone


# ---------------------------------------------------------------------------------------------------- verdict


def _verdict(
    tried: str, batch: Mapping[str, Any], whole: _Run, ring: _Run, leaks: bool, *, by_itself: bool, ring_size: int
) -> Verdict:
    real = _real(batch, whole.logits)
    largest = max((_largest(x) for x in whole.gradients.values()), default=1.0)
    logits = _relative(ring.logits[real], whole.logits[real])
    errors = {"logits": logits}
    if not by_itself:  # the loss and its gradients are of documents that see each other
        errors["loss"] = _relative(ring.loss, whole.loss)
        for name, expected in whole.gradients.items():
            found = ring.gradients.get(name, torch.zeros_like(expected))
            errors[f"the gradient of {name}"] = _largest(found - expected) / max(_largest(expected), 1e-3 * largest)
    first = None if by_itself else _first(batch, whole, ring)
    wrong = {name for name, error in errors.items() if not error <= (_ROUNDING if name == "loss" else TOLERANCE)}
    reasons: list[str] = []
    if leaks:
        reasons.append("documents see each other: other tokens in one document move the logits of another")
    if "logits" in wrong:
        reasons.append(f"the logits differ; {first or 'no module differs before them'}")
    if "loss" in wrong:
        reasons.append(_about_the_loss(batch, whole, ring, "logits" in wrong))
    gradients = {name for name in wrong if name.startswith("the gradient")}
    if gradients and not {"logits", "loss"} & wrong:
        reasons.append(_about_gradients(gradients, errors, whole, ring, ring_size))
    return Verdict(tried, errors, first, reasons)


def _first(batch: Mapping[str, Any], whole: _Run, ring: _Run) -> str | None:
    """The first tensor of a module that differs, in words."""
    for name, found in ring.seen.items():
        expected = whole.seen.get(name)
        if expected is None or expected.shape[1:] != found.shape[1:] or expected.shape[0] not in (1, found.shape[0]):
            continue
        expected = expected.expand_as(found)  # positions may be one row for all
        real = _real(batch, found)
        if _relative(found[real], expected[real]) > TOLERANCE:
            if name.startswith("what "):
                why = "made of right ones between modules: by attention, or by an operation of one's own"
            else:
                why = "whose input is right: it mixes tokens, or its positions or mask are others"
            return f"the first that differs is {name}, {why}"
    return None


def _about_the_loss(batch: Mapping[str, Any], whole: _Run, ring: _Run, logits_differ: bool) -> str:
    values = f"{float(ring.loss):.6f} on the ring, {float(whole.loss):.6f} on one process"
    if logits_differ:
        return f"the loss differs with the logits: {values}"
    labels = batch["labels"]
    unshifted = nn.functional.cross_entropy(whole.logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    if _relative(ring.loss, unshifted) <= _ROUNDING:
        return f"the labels are not shifted: a token's label must be the token after it ({values})"
    return f"the logits are right, so the loss is normalised or labelled in another way: {values}"


def _about_gradients(names: set[str], errors: dict[str, float], whole: _Run, ring: _Run, ring_size: int) -> str:
    worst = max(names, key=errors.__getitem__)
    found, expected = (torch.cat([x.flatten() for x in run.gradients.values()]) for run in (ring, whole))
    if found.shape == expected.shape:
        factor = float((found * expected).sum() / expected.square().sum())
        for times, why in ((float(ring_size), "they are summed twice"), (1 / ring_size, "they are averaged, not summed")):
            if _relative(found, expected * times) <= TOLERANCE:
                return f"the gradients are {factor:.3g} times what they must be: {why} over the ring"
    few = ", ".join(sorted(name.removeprefix("the gradient of ") for name in names)[:3])
    return f"the forward is right and the backward is not: the gradients of {len(names)} parameters differ ({few}), worst {worst}"


def _real(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Where a token is, bool ``[batch, seq]``."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == like.shape[:2]:
        return mask != 0
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)


def _relative(found: Tensor, expected: Tensor) -> float:
    return _largest(found - expected) / max(_largest(expected), 1e-6)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
