"""``cp.verify``: a model on the ring against the same model in one process, in float32, and where they part.

Both get the same whole batch. Every module's inputs and outputs are compared in the order in which they are made, so the first that
differ say which layer is wrong: one whose input is right and whose output is not mixes tokens in a way that is not known here.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.integrations.transformers.batch.sharding import MARK, ModelInputs
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.sequence import IGNORED
from ring_attn.integrations.transformers.verify.documents import documents_of_batch
from ring_attn.integrations.transformers.verify.reached import reach_features
from ring_attn.integrations.transformers.versions import ModelOutput, PretrainedConfig, PreTrainedModel
from ring_attn.ring import Ring
from ring_attn.training.loss import total_loss
from ring_attn.verification.modules import first_that_differs, token_mask, watched
from ring_attn.verification.ranks import everywhere, known_cause, largest_of_all
from ring_attn.verification.verdict import ROUNDING, TOLERANCE, Verdict, largest, relative
from torch_bridge.mesh.rings import ProcessRing

LARGEST = 2**31  # bytes of float32 parameters of which a process holds a copy
_EARLY = 0.1  # times the tolerance: a forward that is off by more is not called right
_NOT_THERE = 0.1  # times what rounding makes: what moves by less in one process is not moved

Batch = Mapping[str, object]
LossOf = Callable[[ModelOutput, ModelInputs], Tensor]
Run = Callable[..., ModelOutput]  # the model, of a batch's entries


class Parallel(Protocol):
    """A ``ContextParallel``, as far as it is compared."""

    model: PreTrainedModel
    ring: Ring
    plan: Plan
    previous: str

    def detached(self) -> AbstractContextManager[None]: ...
    def shard(self, batch: Batch) -> ModelInputs: ...
    def unshard(self, tensor: Tensor, batch: Batch) -> Tensor: ...
    def reduce_gradients(self) -> None: ...
    def remove(self) -> None: ...


class _Run(NamedTuple):
    """One side: the loss of all, logits ``[batch, seq, vocabulary]``, gradients by parameter, and modules' tensors in their order,
    whole sequences ``[batch, seq, ...]`` on both sides."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]
    seen: dict[str, Tensor]


def verify(context: Parallel, batch: Batch, loss: LossOf | None, make: Callable[[nn.Module], Parallel]) -> Verdict:
    """See :meth:`ContextParallel.verify`. ``make``: the context-parallel twin of a model that is not."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ValueError("verify compares losses and gradients: the batch needs labels [batch, seq]")
    twin, tried = _twin(context, batch)
    run = partial(twin, use_cache=False) if context.plan.takes_use_cache else twin
    whole = _in_one_process(twin, run, batch)
    documents = documents_of_batch(batch)
    documents = None if documents is None or documents.shape != labels.shape else documents
    states = bool(context.plan.states)  # which position ids keep apart on the ring alone, by however little they differ otherwise
    joined = documents is not None and (states or _joins(run, batch, documents, whole.logits))
    alone = _each_alone(run, batch, documents, whole.logits) if joined and documents is not None else None
    moved = _moved_by_the_first(lambda given: run(**given).logits, batch)
    parallel = make(twin)
    try:
        ring = _on_the_ring(parallel, batch, loss)
        logits = partial(_logits_on_the_ring, parallel)
        alike = joined and not states and _differ(batch, whole.logits, ring.logits) <= TOLERANCE
        leaks = documents is not None and not alike and _leaks(context, logits, batch, documents)
        leaks |= _sees_more(moved, _moved_by_the_first(logits, batch))
    finally:
        parallel.remove()
    rows = f"{tried}, batch {list(labels.shape)}, {context.ring.size} ranks, layout {context.ring.layout}"
    rows += ", packed documents see each other in one process too" if alike else ""
    expected = whole if alone is None or alike else whole._replace(logits=alone)
    return _verdict(rows, batch, expected, ring, leaks, by_itself=expected is not whole, processes=context.ring.processes)


def _twin(context: Parallel, batch: Batch) -> tuple[PreTrainedModel, str]:
    """A float32 copy of the model as it was before, without dropout and without a cache, which hides packed documents from
    transformers' masks. If the model is too large, it has fewer layers of the same kinds; if the
    weights are not on this rank (FSDP's shards, meta tensors, quantised weights), it has random ones."""
    model = context.model
    parameters = list(model.parameters())
    elsewhere = any(hasattr(x, "device_mesh") or x.device.type == "meta" or not x.is_floating_point() for x in parameters)
    large = 4 * sum(x.numel() for x in parameters) > LARGEST
    kind = type(model).__name__
    if not elsewhere and not large:
        with context.detached():
            twin = copy.deepcopy(model).float().eval()
        _without_cache(twin.config)
        return twin, kind
    config = copy.deepcopy(model.config)
    _without_cache(config)
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
    reached = reach_features(twin, batch)
    return twin, f"{kind} with {text.num_hidden_layers} of its {layers} layers, random weights{reached}"


def _without_cache(config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        if getattr(part, "use_cache", False):
            part.use_cache = False


def _layers_of_all_kinds(config: object) -> int:
    kinds = getattr(config, "layer_types", None) or []
    return max(2, max((kinds.index(kind) + 1 for kind in set(kinds)), default=2))


def _in_one_process(model: nn.Module, run: Run, batch: Batch) -> _Run:
    model.zero_grad()
    with watched(model) as seen:
        outputs = run(**batch)
    outputs.loss.backward()
    return _Run(outputs.loss.detach(), outputs.logits.detach(), _gradients(model), seen)


def _on_the_ring(parallel: Parallel, batch: Batch, loss: LossOf | None) -> _Run:
    model, ring = parallel.model, parallel.ring
    model.zero_grad()
    sharded = parallel.shard(batch)
    sequences = sharded[MARK].sequences
    decoder = sequences["decoder"]
    with watched(model) as local:
        outputs = model(**sharded)
    share = outputs.loss if loss is None else loss(outputs, sharded)
    share.backward()
    parallel.reduce_gradients()
    lengths = {x.local: x.length for x in sequences.values()}
    seen = {name: _whole(x, decoder.ring, lengths, decoder.batch) for name, x in local.items()}
    logits = parallel.unshard(outputs.logits.detach(), sharded)
    value = share.detach() if loss is None else total_loss(share, ring=ring)
    return _Run(value, logits, _gradients(model), {name: x for name, x in seen.items() if x is not None})


def _whole(tensor: Tensor, ring: Ring, lengths: dict[int, int], rows: int) -> Tensor | None:
    if tensor.ndim < 3 or tensor.shape[0] != rows or tensor.shape[1] not in lengths:
        return None
    return ring.unshard(tensor, length=lengths[tensor.shape[1]])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.detach().clone() for name, x in model.named_parameters() if x.grad is not None}


# ---------------------------------------------------------------------------------------------------- documents


def _logits_on_the_ring(parallel: Parallel, batch: Batch) -> Tensor:
    sharded = parallel.shard(batch)
    return parallel.unshard(parallel.model(**sharded).logits, sharded)


def _changed(batch: Batch, places: Tensor) -> dict[str, object]:
    """The batch with other tokens at these places ``[batch, seq]``; the vocabulary is that of the batch."""
    tokens = _tensor(batch, "input_ids")
    return {**batch, "input_ids": torch.where(places, tokens.flip(1).roll(1, 0), tokens)}


@torch.no_grad()
def _leaks(context: Parallel, logits: Callable[[Batch], Tensor], batch: Batch, documents: Tensor) -> bool:
    """Whether other tokens in the first document move another's logits on the ring: by a bit, or, where experts multiply the tokens
    of all documents together, by more than the order of their sums can."""
    first = documents == documents[:, :1]
    before, after = logits(batch), logits(_changed(batch, first))
    experts = any(getattr(context.plan.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    allowed = ROUNDING * largest(before) if experts else 0.0
    moved = (before - after).abs().amax(-1) > allowed
    return bool((moved & ~first & token_mask(batch, before)).any())


@torch.no_grad()
def _joins(run: Run, batch: Batch, documents: Tensor, logits: Tensor) -> bool:
    """Whether packed documents see each other in one process."""
    first = documents == documents[:, :1]
    changed = {name: x for name, x in _changed(batch, first).items() if name != "labels"}
    moved = (run(**changed).logits - logits).abs().amax(-1)
    return largest(moved[~first & token_mask(batch, logits)]) > ROUNDING * largest(logits)


@torch.no_grad()
def _each_alone(run: Run, batch: Batch, documents: Tensor, logits: Tensor) -> Tensor:
    """The logits of each document by itself, for a model that does not keep them apart in one process: its own are no measure."""
    alone, tokens = torch.zeros_like(logits), _tensor(batch, "input_ids")
    for row in range(documents.shape[0]):
        for document in documents[row].unique():
            places = (documents[row] == document).nonzero().flatten()
            alone[row, places] = run(input_ids=tokens[row, places][None]).logits[0]
    return alone


@torch.no_grad()
def _moved_by_the_first(logits: Callable[[Batch], Tensor], batch: Batch) -> Tensor | None:
    """By how much another first token moves each token's logits ``[batch, seq]``, relative to the largest. No reading of the batch
    is asked: what it means shows in what moves."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape != _tensor(batch, "labels").shape:
        return None
    changed = tokens.clone()
    for row, real in enumerate(token_mask(batch, tokens)):
        real_tokens = tokens[row][real]
        others = real_tokens[real_tokens != real_tokens[:1]]
        if len(others):
            changed[row, real.nonzero()[0]] = others[0]
    before, after = logits(batch), logits({**batch, "input_ids": changed})
    return (before - after).abs().amax(-1) / max(largest(before), 1e-6)


def _sees_more(in_process: Tensor | None, on_ring: Tensor | None) -> bool:
    """Whether a token is moved on the ring that nothing moves in one process."""
    if in_process is None or on_ring is None:
        return False
    return bool(((on_ring > ROUNDING) & (in_process < _NOT_THERE * ROUNDING)).any())


def _differ(batch: Batch, one: Tensor, other: Tensor) -> float:
    real = token_mask(batch, one)
    return relative(other[real], one[real])


# ---------------------------------------------------------------------------------------------------- verdict


def _verdict(tried: str, batch: Batch, whole: _Run, ring: _Run, leaks: bool, *, by_itself: bool, processes: ProcessRing) -> Verdict:
    most = max((largest(x) for x in whole.gradients.values()), default=1.0)
    errors = {"logits": _differ(batch, whole.logits, ring.logits)}
    if not by_itself:  # the loss and its gradients are of documents that see each other
        errors["loss"] = relative(ring.loss, whole.loss)
        for name, expected in whole.gradients.items():
            gradient = ring.gradients.get(name, torch.zeros_like(expected))
            errors[f"the gradient of {name}"] = largest(gradient - expected) / max(largest(expected), 1e-3 * most)
    device = whole.logits.device
    errors = dict(zip(errors, largest_of_all(list(errors.values()), processes, device), strict=True))
    leaks = not everywhere(not leaks, processes, device)
    first = None if by_itself else first_that_differs(ring.seen, whole.seen, partial(token_mask, batch), TOLERANCE)
    wrong = {name for name, error in errors.items() if not error <= (ROUNDING if name == "loss" else TOLERANCE)}
    reasons = _of_one_process(processes)
    if leaks:
        reasons.append("documents see each other: other tokens in one document move the logits of another")
    if "logits" in wrong:
        reasons.append(f"the logits differ; {first or 'no module differs before them'}")
    if "loss" in wrong:
        reasons.append(_about_the_loss(batch, whole, ring, "logits" in wrong))
    gradients = {name for name in wrong if name.startswith("the gradient")}
    if gradients and not {"logits", "loss"} & wrong:
        early = first_that_differs(ring.seen, whole.seen, partial(token_mask, batch), _EARLY * TOLERANCE)
        reasons.append(_about_gradients(gradients, errors, whole, ring, processes, early))
    return Verdict(tried, errors, first, reasons)


def _of_one_process(ring: ProcessRing) -> list[str]:
    """In a job of several processes a ring of one is a mistake, but for "local", which has no group."""
    if ring.size > 1 or not ring.groups or dist.get_world_size() == 1:
        return []
    return [
        f"nothing is sharded: the ring has one process of {dist.get_world_size()}. Take the mesh dimension that the sequence is "
        "sharded over: sizes or names of the mesh may be swapped"
    ]


def _about_the_loss(batch: Batch, whole: _Run, ring: _Run, logits_differ: bool) -> str:
    values = f"{float(ring.loss):.6f} on the ring, {float(whole.loss):.6f} on one process"
    if logits_differ:
        return f"the loss differs with the logits: {values}"
    labels = _tensor(batch, "labels")
    unshifted = nn.functional.cross_entropy(whole.logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    if relative(ring.loss, unshifted) <= ROUNDING:
        return f"the labels are not shifted: a token's label must be the token after it ({values})"
    return f"the logits are right, so the loss is normalised or labelled in another way: {values}"


def _about_gradients(
    names: set[str], errors: dict[str, float], whole: _Run, ring: _Run, processes: ProcessRing, early: str | None
) -> str:
    worst = max(names, key=errors.__getitem__)
    pairs = [(ring.gradients.get(name, torch.zeros_like(x)), x) for name, x in whole.gradients.items()]
    actual, expected = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
    known = known_cause(actual, expected, processes, TOLERANCE)
    if known:
        return known
    few = ", ".join(sorted(name.removeprefix("the gradient of ") for name in names)[:3])
    where = (
        f"the forward differs by less than the logits' tolerance ({early})"
        if early
        else "the forward is right and the backward is not"
    )
    return f"{where}: the gradients of {len(names)} parameters differ ({few}), worst {worst}"


def _tensor(batch: Batch, name: str) -> Tensor:
    tensor = batch[name]
    assert isinstance(tensor, Tensor)
    return tensor
