"""A whole batch, as a data collator makes it, as this rank's part of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ring_attn.documents.positions import of_text
from ring_attn.integrations.transformers.batch.documents import PACKING, documents_of
from ring_attn.integrations.transformers.batch.entries import PASSED, REFUSED, TOKEN_TYPES
from ring_attn.integrations.transformers.calls import Sharded
from ring_attn.integrations.transformers.layers.positions import embeds_positions
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.sequence import IGNORED, Sequence, describe
from ring_attn.packed.ring import PlacingRing
from ring_attn.ring import Ring
from ring_attn.sharding.marks import is_shard, mark_shard
from ring_attn.sharding.padding import forget_padding
from ring_attn.training.shared_state import fingerprints

ModelInputs = dict[str, Any]  # by name: tensors, numbers, flags, and the mark
Inputs = tuple[tuple[object, ...], ModelInputs]  # as torch gives them to a hook
MARK = "ring_attn"  # the entry of a sharded batch that says so; the model's pre-forward hook takes it out


class _Names(NamedTuple):
    """What a model calls the inputs of one sequence."""

    ids: str
    embeddings: str
    mask: str
    positions: str


_MAIN = _Names("input_ids", "inputs_embeds", "attention_mask", "position_ids")
_OF_DECODER = _Names("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids")


def shard_batch(plan: Plan, ring: Ring, owner: object, batch: Mapping[str, object]) -> ModelInputs:
    """This rank's part of a whole batch: what :meth:`ContextParallel.shard` returns."""
    inputs: ModelInputs = {name: _tensor(value) for name, value in batch.items() if value is not None}
    _check_whole(inputs)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim}
    whole = {name: fingerprints(x) if x.is_floating_point() or x.is_complex() else x for name, x in tensors.items()}
    labels, items = _labels(plan, inputs), inputs.pop("num_items_in_batch", None)
    local_inputs: ModelInputs = {}
    sequences: dict[str, Sequence] = {}
    names = _OF_DECODER if plan.encoder_decoder else _MAIN
    if plan.encoder_decoder:
        if _OF_DECODER.ids not in inputs and _OF_DECODER.embeddings not in inputs and labels is not None:
            inputs[_OF_DECODER.ids] = plan.decoder_inputs(labels)
        if plan.whole_encoder:
            local_inputs |= {name: inputs.pop(name) for name in (plan.whole_encoder, "attention_mask") if name in inputs}
        else:
            sequences["encoder"] = _sequence(plan, ring, _MAIN, inputs, local_inputs, None)
    sequences["decoder"] = sequence = _sequence(plan, ring, names, inputs, local_inputs, labels)
    for described in sequences.values():
        forget_padding(described.local)
    local_inputs |= _others(plan, sequence, inputs)
    if labels is not None:
        local_inputs["labels"] = local_inputs["shift_labels"] = sequence.shard(labels, IGNORED)
        local_inputs["num_items_in_batch"] = items = (labels != IGNORED).sum() if items is None else items
    checked = (names.ids, names.embeddings, names.positions, "labels", "shift_labels")
    entries = {name: local_inputs[name] for name in checked if name in local_inputs}
    return {**local_inputs, MARK: Sharded(owner, sequences, items, whole, entries)}


def _check_whole(inputs: Mapping[str, object]) -> None:
    sharded = [name for name, value in inputs.items() if is_shard(value)]
    if sharded:
        raise ValueError(
            f"cp.shard takes the whole batch, the same on all ranks, and {', '.join(sharded)} of this one hold one rank's part "
            "already (Ring.shard, or an earlier cp.shard); leave that call out"
        )


def _tensor(value: object) -> object:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _labels(plan: Plan, inputs: ModelInputs) -> Tensor | None:
    """Whole labels, each where it is predicted."""
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    if labels is None and shifted is None:
        return None
    plan.check_labels()
    if shifted is not None or not plan.shifts_labels:
        return labels if shifted is None else shifted
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _sequence(
    plan: Plan, ring: Ring, names: _Names, inputs: ModelInputs, local_inputs: ModelInputs, labels: Tensor | None
) -> Sequence:
    """The sequence of these names; takes them out of ``inputs``, and puts this rank's parts into ``local_inputs``."""
    tokens, name = inputs.pop(names.ids, None), names.ids
    if tokens is None:
        tokens, name = inputs.pop(names.embeddings, None), names.embeddings
    if not isinstance(tokens, Tensor) or tokens.ndim != (2 if name == names.ids else 3) or names.embeddings in inputs:
        raise ValueError(
            f"the batch needs either {names.ids} [batch, seq] or {names.embeddings} [batch, seq, dim], of the whole sequence"
        )
    mask, positions = inputs.pop(names.mask, None), inputs.pop(names.positions, None)
    _check_positions(plan, names, positions, tokens)
    plan.check_length(tokens.shape[1])
    packing = {x: inputs.pop(x) for x in PACKING if x in inputs}
    documents, by_position = documents_of(tokens, mask, positions, packing, plan.axes)
    if isinstance(ring, PlacingRing):
        ring = ring.of(documents, by_place=any(name in inputs for name in TOKEN_TYPES))
    mask = documents >= 0 if documents is not None else mask
    positions = plan.positions_of(tokens, mask) if positions is None else positions
    sequence = describe(ring, tokens, mask, documents, positions, labels)
    local_inputs[name] = sequence.shard(tokens, plan.pad_id if name == names.ids else 0)
    mark_shard(local_inputs[name])  # for generate, which may be given this tensor alone
    if plan.takes(names.mask):  # what it says is in the sequence; without one transformers would look for documents in position ids
        local_inputs[names.mask] = torch.ones(sequence.batch, sequence.local, dtype=torch.bool, device=tokens.device)
        mark_shard(local_inputs[names.mask])
    local_positions = _positions(sequence, positions)
    if plan.takes(names.positions):
        local_inputs[names.positions] = local_positions
    counted = of_text(local_positions, plan.axes) if by_position and plan.counts_within_documents else None
    return replace(sequence, position_ids=local_positions, positions=counted)


def _check_positions(plan: Plan, names: _Names, positions: Tensor | None, tokens: Tensor) -> None:
    if positions is None:
        return
    if positions.shape[-1] != tokens.shape[1]:
        raise ValueError(
            f"{names.positions} {list(positions.shape)} must be those of the whole sequence, of {tokens.shape[1]} tokens"
        )
    if not plan.takes_positions and any(embeds_positions(module) for module in plan.model.modules()):
        raise ValueError(
            f"{type(plan.model).__name__} takes no {names.positions}: it counts them itself; take them out of the batch"
        )


def _positions(sequence: Sequence, positions: Tensor | None) -> Tensor:
    """Position ids of this rank's tokens; those of padding are 0, which every model has."""
    if positions is None:
        positions = torch.arange(sequence.length, device=sequence.device)
    if positions.ndim <= 2:
        positions = positions.expand(sequence.batch, -1)
    return sequence.shard(positions, dim=-1)


def _others(plan: Plan, sequence: Sequence, inputs: ModelInputs) -> ModelInputs:
    """The entries that are no sequence of tokens; ValueError or NotImplementedError for one that cannot be honoured."""
    local_inputs: ModelInputs = {"use_cache": False} if plan.takes_use_cache else {}
    for name, value in inputs.items():
        if name in TOKEN_TYPES:
            # Masks read them at any position, embeddings at this rank's.
            local_inputs[name] = sequence.ring.pad(value) if plan.masks_read_token_types else sequence.shard(value)
        elif name in PASSED:
            local_inputs[name] = value
        elif name in REFUSED and (value is not False and value != 0 if not isinstance(value, Tensor) else True):
            raise NotImplementedError(f"{name} cannot be sharded: {REFUSED[name]}")
        elif name not in REFUSED:
            raise ValueError(
                f"the batch holds {name!r}, and how it is sharded is not known; take it out, or shard it yourself "
                "(cp.ring.shard) and give it to the model beside the batch"
            )
    return local_inputs
