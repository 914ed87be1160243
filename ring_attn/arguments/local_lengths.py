"""``cu_seqlens`` of one rank's tokens where those of the whole sequence are meant: all tokens after them would be padding."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge.call.sanity_checks import warn_once
from torch_bridge.failures.events import recorded


class _Asked(NamedTuple):
    """Where ``cu_seqlens`` end, on its way from a device, to be read once ``arrived``; None where that is now."""

    name: str
    end: Tensor
    arrived: torch.cuda.Event | None
    shard: int
    total: int


_asked: list[_Asked] = []


def warn_of_local_lengths(name: str, ends: Tensor, shard: int, total: int) -> None:
    """Doubt ``cu_seqlens`` of the whole sequence of ``total`` tokens that end within the first rank's shard. All are looked at,
    once while they are the same; those on a GPU at a later call, without a wait."""
    if shard == total or torch.compiler.is_compiling():
        return
    if ends.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    looked_at = 0 if ends.is_inference() else ends._version, shard, total
    if getattr(ends, "ring_attn_looked_at", None) != looked_at:
        ends.ring_attn_looked_at = looked_at  # type: ignore[attr-defined]
        end = ends.detach()[-1].to("cpu", non_blocking=True)
        _asked.append(_Asked(name, end, recorded(ends.device), shard, total))
    while _asked and (_asked[0].arrived is None or _asked[0].arrived.query()):  # in the order in which they were asked
        _check(_asked.pop(0))


def _check(asked: _Asked) -> None:
    if 0 < (last := int(asked.end)) <= asked.shard:
        warn_once(
            f"{asked.name} ends at {last}, within the first rank's shard of {asked.shard} tokens, and the rest is padding: it must "
            f"be that of the whole sequence of {asked.total}; the ring_ and zigzag_ring_ functions of ring_attn.flash take a "
            "rank's own"
        )
