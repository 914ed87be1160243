"""Calls that are valid but probably not meant.

A ring can compute with shards that hold the wrong tokens, and every number is then wrong in silence. What each rank holds is
therefore told to the others when a program runs for the first time. What is certain raises; a doubt, which goes by a symptom, is a
:class:`DoubtWarning`, once, and never an error.
"""

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TypedDict

import torch

from jax_core.masks.layout import Layout
from torch_bridge.failures.watchdog import exchange, known_to_all
from torch_bridge.mesh.rings import ProcessRing

_SAMPLES = 64  # positions of a shard that its fingerprint reads
_ROUNDING = 0.05  # of the largest value: more than two processes of one program are apart
_MANY_HEADS = 128  # what no known model exceeds
_HOW_TO_SILENCE = 'If it is meant, warnings.simplefilter("ignore", ring_attn.DoubtWarning) silences this'
_BATCHES = 16  # whose checksums are kept: the first ones


class DoubtWarning(RuntimeWarning):
    """A call looks like a mistake and may be none. It is told once; ``warnings.simplefilter("ignore", ring_attn.DoubtWarning)``
    silences all of these, and "error" makes them errors."""


class Holding(TypedDict):
    """What one rank tells the others: the layout of the call (empty where it has no meaning), the layouts in which the rank has
    taken shards of that length, its values' fingerprint, and checksums of the whole batches that it has sharded first."""

    layout: str
    sharded: list[str]
    values: str
    batches: list[list[int]]


# By the global ranks of a ring and the length of a shard: the layouts in which this process has taken such shards, or positions.
_sharded: defaultdict[tuple[tuple[int, ...], int], set[str]] = defaultdict(set)
# By the global ranks of a ring: checksums of the first whole batches of which this process has taken its part, each int64 [n].
_batches: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)


def note_layout(ring: object, layout: Layout, length: int) -> None:
    """Remember that this process has taken its shard, of this length, for ``ring`` in ``layout``."""
    if isinstance(ring, ProcessRing) and ring.size > 1:
        _sharded[ring.ranks, length].add(str(layout))


def note_batch(ring: object, sums: torch.Tensor) -> None:
    """Remember the checksums of a whole batch, of which each rank of ``ring`` takes its part."""
    if isinstance(ring, ProcessRing) and len(batches := _batches[ring.ranks]) < _BATCHES:
        batches.append(sums)


def check_shards(ring: ProcessRing, layout: str, value: torch.Tensor) -> None:
    """Compare what the ranks of a ring hold. A ring call: all ranks make it, and all of them object or none."""
    sharded = sorted(_sharded.get((ring.ranks, value.shape[1]), ()))
    batches = [sums.tolist() for sums in _batches.get(ring.ranks, ())]
    local = Holding(layout=layout, sharded=sharded, values=fingerprint(value), batches=batches)
    answers = exchange(ring, "what each rank holds", json.dumps(local))
    ranks: list[Holding] = [json.loads(text) for text in answers] if answers else [local] * ring.size
    if mistake := different_batches(ranks):
        _batches.pop(ring.ranks)
        with known_to_all():
            raise ValueError(f"{mistake} ({ring})")
    if warning := probable_mistake(ranks):
        warn_once(f"{warning} ({ring})")


def different_batches(ranks: list[Holding]) -> str | None:
    """What is wrong where the ranks have sharded batches, and none that all of them have."""
    batches = [{tuple(sums) for sums in rank["batches"]} for rank in ranks]
    if not all(batches) or set.intersection(*batches):
        return None
    return (
        "the ranks of this ring have sharded different batches: each must give shard_batch or shard_packed the same whole batch "
        "(or labels, mask, segment and position ids). Sample by data-parallel ranks (DistributedSampler with the number and rank "
        "of rings), not by processes, with one seed and one order on all ranks of a ring"
    )


def check_same_queries(ring: ProcessRing, query: torch.Tensor) -> None:
    """Raises ValueError on all ranks of a ring unless they hold the same queries. A ring call, as :func:`check_shards`."""
    for _, ranks in _mismatched(ring, {"queries": query}):
        with known_to_all():
            raise ValueError(
                f"the queries must be the same on all ranks of the {ring}, as the new tokens that all of them decode; those of "
                f"ring ranks {ranks} differ from rank 0's: let one rank choose the tokens for all"
            )


def check_shared(ring: ProcessRing, function: str, operands: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError on all ranks of a ring unless they hold the same ``operands``. A ring call, as :func:`check_shards`."""
    for name, ranks in _mismatched(ring, operands):
        with known_to_all():
            raise ValueError(
                f"{name} of {function} must be the same on all ranks of the {ring}; those of ring ranks {ranks} differ from rank "
                "0's: load or broadcast the same values, and let all ranks take the same optimizer steps"
            )


def _mismatched(ring: ProcessRing, shared: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, list[int]]]:
    """What the ranks do not share, and which ranks hold something else than the first. Processes may have rounded differently, so
    a few values are compared, not bits."""
    flat = {name: x.detach().float().flatten() for name, x in shared.items() if x.numel()}
    some = {name: x[:: max(1, x.numel() // _SAMPLES)].tolist() for name, x in flat.items()}
    answers = exchange(ring, f"what all ranks share: {', '.join(shared)}", json.dumps(some))
    samples = [json.loads(text) for text in answers] if answers else [some]
    for name in some:
        ranks = torch.tensor([each[name] for each in samples])
        mismatched = (ranks - ranks[:1]).abs().amax(1) > _ROUNDING * ranks.abs().max()
        if bool(mismatched.any()):
            yield name, mismatched.nonzero().flatten().tolist()


def probable_mistake(ranks: list[Holding]) -> str | None:
    """What is probably wrong with what the ranks of a ring hold, or None."""
    sharded = [rank["sharded"] for rank in ranks]
    if any(layouts != sharded[0] for layouts in sharded):
        each = "; ".join(f"ring rank {number}: {', '.join(layouts) or 'none'}" for number, layouts in enumerate(sharded))
        return f"the ranks of this ring took their shards in different layouts: {each}; use one ring_attn.Ring for all"
    layout = ranks[0]["layout"]
    if layout and sharded[0] and layout not in sharded[0]:
        return (
            f"shards of this length were taken as {', '.join(sharded[0])} and attention was called with layout={layout!r}: if "
            "these are the same tokens, masks and positions are wrong; give both one layout, or use one ring_attn.Ring for both"
        )
    values = {rank["values"] for rank in ranks}
    if len(values) == 1 and values != {""}:
        return (
            "every rank of the ring holds the same values, as if each had the whole sequence; each must have its own part: "
            'ring_attn.shard or shard_batch takes it. If every process is to attend to its own sequence alone, pass mesh="local"'
        )
    return None


def fingerprint(value: torch.Tensor) -> str:
    """A hash of some values ``[batch, seq, heads, dim]`` of the first head; empty if they are the same at all positions."""
    step = max(1, value.shape[1] // _SAMPLES)
    some = value.detach()[:, ::step, :1].float().cpu()
    if some.numel() == 0 or bool((some == some[:, :1]).all()):
        return ""
    return hashlib.sha256(some.contiguous().numpy().tobytes()).hexdigest()[:16]


def suspect_swapped_dims(query: torch.Tensor, key: torch.Tensor, qkv_format: str) -> None:
    """Doubt ``[batch, seq, heads, dim]`` tensors whose heads look like positions: they are many, or as many as a shard has that
    this process has taken, where none has been as long as their positions. The format is the one they were given in."""
    if torch.compiler.is_compiling():
        return
    taken = {length for _, length in _sharded}
    both = query.shape[1:3], key.shape[1:3]
    many = all(heads > _MANY_HEADS and heads >= 4 * max(1, positions) for positions, heads in both)
    heads_are_shards = all(heads in taken and heads > positions and positions not in taken for positions, heads in both)
    if many or (heads_are_shards and query.shape[1] % max(1, key.shape[1]) == 0):
        other = "bhsd" if qkv_format == "bshd" else "bshd"
        warn_once(
            f"with qkv_format={qkv_format!r} the queries have {query.shape[1]} positions and {query.shape[2]} heads; if it is the "
            f"other way round, pass qkv_format={other!r}"
        )


@cache
def warn_once(message: str) -> None:
    """A :class:`DoubtWarning`, once for each text. All ranks of a ring may warn or one alone: nobody waits for it."""
    warnings.warn(f"{message}. {_HOW_TO_SILENCE}", DoubtWarning, stacklevel=2)
