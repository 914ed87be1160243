"""Calls that are valid but probably not meant: a warning, once each, or a ValueError with ``RING_ATTN_STRICT=1``.

A ring can compute with shards that hold the wrong tokens, and every number is then wrong in silence. What each rank holds is
therefore told to the others when a program runs for the first time.
"""

import hashlib
import json
import os
import sys
import warnings
from collections import defaultdict
from functools import cache
from types import FrameType
from typing import Any, TypedDict

import torch

from jax_core.masks.layout import Layout
from torch_bridge.job.mesh import Ring
from torch_bridge.job.watchdog import exchange, known_to_all

_SAMPLES = 64  # positions of a shard that its fingerprint reads
_ROUNDING = 0.05  # of the largest value: more than two processes of one program are apart
_MANY_HEADS = 128  # what no known model exceeds


class Holding(TypedDict):
    """What one rank tells the others: whether a doubt is an error there, the layout of the call (empty where it has no meaning),
    the layouts that the rank has sharded in, and its values' fingerprint."""

    strict: bool
    layout: str
    sharded: list[str]
    values: str


# By the global ranks of a ring: the layouts in which this process has taken shards or positions for it.
_sharded: defaultdict[tuple[int, ...], set[str]] = defaultdict(set)


def note_layout(ring: Any, layout: Layout) -> None:
    """Remember that this process has taken its shard for ``ring`` in ``layout``."""
    if isinstance(ring, Ring) and ring.size > 1:
        _sharded[ring.ranks].add(str(layout))


def check_shards(ring: Ring, layout: str, value: torch.Tensor) -> None:
    """Compare what the ranks of a ring hold. A ring call: all ranks make it, and all of them object or none."""
    own = Holding(strict=_strict(), layout=layout, sharded=sorted(_sharded[ring.ranks]), values=fingerprint(value))
    told = exchange(ring, "what each rank holds", json.dumps(own))
    ranks: list[Holding] = [json.loads(text) for text in told] if told else [own] * ring.size
    doubt = suspicion(ranks)
    if doubt and any(rank["strict"] for rank in ranks):  # one rank's environment holds for all: they raise together
        with known_to_all():
            raise ValueError(_as_error(f"{doubt} ({ring})"))
    if doubt:
        _warn_once(f"{doubt} ({ring})")


def check_same_queries(ring: Ring, query: torch.Tensor) -> None:
    """Raises ValueError on all ranks of a ring unless they hold the same queries. A ring call, as :func:`check_shards`.

    Processes may have rounded differently, so a few values are compared, not bits."""
    flat = query.detach().float().flatten()
    some = flat[:: max(1, flat.numel() // _SAMPLES)].cpu()
    told = exchange(ring, "the queries that all ranks share", json.dumps(some.tolist()))
    ranks = torch.tensor([json.loads(text) for text in told]) if told else some[None]
    apart = (ranks - ranks[0]).abs().amax(1) > _ROUNDING * ranks.abs().max()
    if bool(apart.any()):
        with known_to_all():
            raise ValueError(
                f"the queries must be the same on all ranks of the {ring}, as the new tokens that all of them decode; those of "
                f"ring ranks {apart.nonzero().flatten().tolist()} differ from rank 0's: let one rank choose the tokens for all"
            )


def shapes_only() -> bool:
    """Whether torch.distributed.pipelining runs a stage on uninitialised memory, perhaps equal on all ranks, for its shapes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None


def suspicion(ranks: list[Holding]) -> str | None:
    """What is probably wrong with what the ranks of a ring hold, or None."""
    sharded = [rank["sharded"] for rank in ranks]
    if any(layouts != sharded[0] for layouts in sharded):
        each = "; ".join(f"ring rank {number}: {', '.join(layouts) or 'none'}" for number, layouts in enumerate(sharded))
        return f"the ranks of this ring took their shards in different layouts: {each}; use one ring_attn.Ring for all"
    layout = ranks[0]["layout"]
    if layout and sharded[0] and layout not in sharded[0]:
        return (
            f"the sequence was sharded as {', '.join(sharded[0])} but attention was called with layout={layout!r}, so masks and "
            "positions are wrong; give both the same layout, or use one ring_attn.Ring for both"
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


def suspect_swapped_dims(query: torch.Tensor, key: torch.Tensor, qkv_format: str) -> bool:
    """Object to ``[batch, seq, heads, dim]`` tensors whose heads look like positions, and tell whether they do. The format is the
    one they were given in."""
    if torch.compiler.is_compiling():
        return False
    suspicion = all(x.shape[2] > _MANY_HEADS and x.shape[2] >= 4 * max(1, x.shape[1]) for x in (query, key))
    if suspicion:
        other = "bhsd" if qkv_format == "bshd" else "bshd"
        warn_or_raise(
            f"with qkv_format={qkv_format!r} the queries have {query.shape[1]} positions and {query.shape[2]} heads; if it is the "
            f"other way round, pass qkv_format={other!r}"
        )
    return suspicion


def warn_or_raise(doubt: str) -> None:
    """Raise ValueError under ``RING_ATTN_STRICT=1``, or else warn, once for each text."""
    if _strict():
        raise ValueError(_as_error(doubt))
    _warn_once(doubt)


def _strict() -> bool:
    return os.environ.get("RING_ATTN_STRICT", "0") not in ("", "0")


def _as_error(doubt: str) -> str:
    return f"{doubt}. (RING_ATTN_STRICT is set; without it this is a warning.)"


@cache
def _warn_once(doubt: str) -> None:
    warnings.warn(f"{doubt}. RING_ATTN_STRICT=1 makes this an error.", RuntimeWarning, stacklevel=2)
