"""Which whole batches the losses of a step were of, by what their labels carry: all ranks of a ring must have the same."""

from collections import defaultdict

import torch
from torch import Tensor

from ring_attn.arguments.shards import called_since
from ring_attn.sharding.marks import IDS, Shard, has_documents, shard_of, whole_of
from torch_bridge.call.sanity_checks import warn_once
from torch_bridge.mesh.rings import ProcessRing

NUMBERS = 2  # that tell the batches of a step: how many, and a checksum of all in their order
_FACTOR = 1_000_003
# By the global ranks of a ring: what tells the batches of the losses since the last sum of gradients.
_since: defaultdict[tuple[int, ...], tuple[int, Tensor]] = defaultdict(lambda: (0, torch.zeros((), dtype=torch.int64)))


def note_loss(labels: Tensor, has_gradient: bool) -> None:
    """That a loss is made of these labels, this rank's shard; what looks wrong about them is doubted."""
    shard, whole = shard_of(labels), whole_of(labels)
    called = called_since(labels.shape[-1])
    if shard is not None and shard.ring and shard.role == IDS:
        _warn_of_ids()
    for kind in sorted({each.kind for each in called}):
        alike = [each for each in called if each.kind == kind]
        if shard is not None and shard.ring:
            _warn_of_layouts(shard, kind, {each.layout for each in alike})
        if has_documents(labels) and not any(each.masked for each in alike):
            _warn_of_documents(kind)
    if whole is not None and has_gradient:
        ring, sums = whole
        count, before = _since[ring]
        number = (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
        _since[ring] = count + 1, before.to(sums.device) * _FACTOR + number


def _warn_of_ids() -> None:
    warn_once(
        "cross_entropy: the labels are the input_ids of shard_batch itself, so each token is to predict itself. Give the "
        "batch, or its labels, which are shifted before they are sharded; right only for a model that predicts tokens in place"
    )


def _warn_of_layouts(shard: Shard, kind: str, called: set[str | None]) -> None:
    if None not in called and shard.layout not in called:
        layouts = ", ".join(sorted(repr(layout) for layout in called))
        warn_once(
            f"the batch of this loss was sharded with layout={shard.layout!r}, and every {kind} since the last loss was "
            f"called with {layouts}: if it is that of this batch, masks and positions are wrong. Give both "
            "the same, or use one ring_attn.Ring for both"
        )


def _warn_of_documents(kind: str) -> None:
    warn_once(
        f"the batch of this loss has several documents in a row, and no {kind} since the last loss was told of them: they see each "
        "other. Give attention q_segment_ids=batch.segment_ids (and its positions, for rotary embeddings), or cu_seqlens, or a "
        "mask, and layers with a state segment_ids; right only for documents that are one context"
    )


def taken(ring: ProcessRing, device: torch.device) -> Tensor:
    """int64 ``[ring size, NUMBERS]``: the numbers of this rank's batches since they were taken last, in its row; else zeros."""
    count, sums = _since.pop(ring.ranks, (0, torch.zeros((), dtype=torch.int64)))
    rows = torch.zeros(ring.size, NUMBERS, dtype=torch.int64, device=device)
    rows[ring.rank, 0], rows[ring.rank, 1] = count, sums.to(device)
    return rows


def differ(ranks: list[list[int]]) -> bool:
    """Whether the ranks' losses, as many on each, were of different batches."""
    return len({row[0] for row in ranks}) == 1 and len({row[1] for row in ranks}) > 1
