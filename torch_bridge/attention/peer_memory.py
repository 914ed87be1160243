"""What ranks of one host gather through memory that their GPUs read of each other: torch's symmetric memory.

NCCL takes some 30 us to gather the few KiB of a decoding step, a fifth of a layer's attention at 256k tokens. Each rank writes its
part among zeros, and torch's one-shot all-reduce adds what all have: 0 and -inf are exact.
"""

from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.failures.watchdog import exchange
from torch_bridge.mesh.rings import ProcessRing

_MOST_RANKS, _MOST_BYTES = 8, 1 << 20  # beyond which each rank would read so much of each that NCCL is as fast
_WHAT = "whether GPUs read each other's memory"
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], PeerMemory | None]]" = WeakKeyDictionary()


class PeerMemory:
    """``parts``: float32 ``[ranks, *shape]`` in symmetric memory, all 0 but for :attr:`own`."""

    def __init__(self, parts: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        self.own, self._parts, self._group = parts[rank], parts, group.group_name

    def gathered(self) -> Tensor:
        """``own`` of all ranks, in memory of the call's. All ranks call it, in one order."""
        return torch.ops.symm_mem.one_shot_all_reduce(self._parts, "sum", self._group)


def peer_memory(ring: ProcessRing, shape: tuple[int, ...], device: torch.device) -> PeerMemory | None:
    """Of the ring's ranks, one for each shape; None, on all of them, where they are not on one host, or one of them cannot. The
    first call for a shape waits for all ranks."""
    parts = (ring.size, *shape)
    if device.type != "cuda" or len(ring.groups) != 1 or not 1 < ring.size <= _MOST_RANKS:
        return None
    if 4 * torch.Size(parts).numel() > _MOST_BYTES:
        return None
    (group,) = ring.groups
    made = _made.setdefault(group, {})
    if parts not in made:
        made[parts] = _make(ring, parts, device)
    return made[parts]


def _make(ring: ProcessRing, parts: tuple[int, ...], device: torch.device) -> PeerMemory | None:
    empty, host = _empty(parts, device)
    if exchange(ring, _WHAT, host) is not None or empty is None:
        return None
    (group,), reason = ring.groups, ""
    try:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.rendezvous(empty, group)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if exchange(ring, _WHAT, reason) is not None or reason:
        return None
    return PeerMemory(empty, ring.rank, group)


def _empty(parts: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, str]:
    """Zeros in symmetric memory, and on which host; None and the reason where there is none."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        empty = symmetric.empty(parts, dtype=torch.float32, device=device).zero_()
        return empty, Path("/proc/sys/kernel/random/boot_id").read_text()
    except Exception as error:  # whatever it is, NCCL gathers, too
        return None, f"{type(error).__name__}: {error}"
