"""What ranks of one host gather through memory that their GPUs read of each other: torch's symmetric memory.

NCCL takes 14 us to gather the few KiB of a decoding step in a graph, this half. Each rank writes its part among zeros, and torch's
one-shot all-reduce adds what all have: 0 and -inf are exact.
"""

import logging
import os
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.failures.watchdog import exchange
from torch_bridge.mesh.rings import ProcessRing

_MOST_RANKS, _NUMBERS = 8, 1 << 18  # a rank reads all of this of each other; beyond it NCCL is as fast
_LOG = logging.getLogger("ring_attn")
_WHAT = "whether GPUs read each other's memory"
_last: dict[torch.device, torch.cuda.Stream] = {}
_memories: "WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None]" = WeakKeyDictionary()


class PeerMemory:
    """Memory of all ranks of a ring, for one gathering after another."""

    def __init__(self, memory: Tensor, ring: ProcessRing) -> None:
        # Not the ring, which holds the group by which this is kept.
        self._memory, self._ranks, self._group = memory, ring.size, ring.groups[0].group_name

    def gathered(self, shape: torch.Size) -> Tensor:
        """``[ranks, *shape]``, in memory of the call's: what each has written. All ranks call it, in one order."""
        return torch.ops.symm_mem.one_shot_all_reduce(self.parts(shape), "sum", self._group)

    def parts(self, shape: torch.Size) -> Tensor:
        """``[ranks, *shape]``, float32: where this rank's part is to be written, and 0 in the place of the others'."""
        return self._memory[: self._ranks * shape.numel()].view(self._ranks, *shape)


def peer_memory(ring: ProcessRing, numbers: int, device: torch.device) -> PeerMemory | None:
    """For parts of so many numbers; None, on all ranks, where they are not on one host, or one of them cannot. The first call of a
    ring waits for all ranks."""
    if device.type != "cuda" or len(ring.groups) != 1 or not 1 < ring.size <= _MOST_RANKS or ring.size * numbers > _NUMBERS:
        return None
    (group,) = ring.groups
    if group not in _memories:
        _memories[group] = _make(ring, device)
    return _memories[group]


def follow_the_last(device: torch.device) -> None:
    """Of a device one stream decodes at a time, as the memory that GPUs read of each other is there once: the current stream waits
    for the one that decoded before it."""
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    last = _last.get(stream.device)
    if last is not None and last != stream:
        stream.wait_stream(last)
    _last[stream.device] = stream


def _make(ring: ProcessRing, device: torch.device) -> PeerMemory | None:
    memory, reason = _met(ring, device)
    if memory is None or reason:
        _LOG.info("GPUs of the %s do not read each other's memory, NCCL gathers: %s", ring, reason)
        return None
    _LOG.info("GPUs of the %s read each other's memory", ring)
    return PeerMemory(memory, ring)


def _met(ring: ProcessRing, device: torch.device) -> tuple[Tensor | None, str]:
    """Memory that all ranks know of each other, or why there is none."""
    memory, place = _empty(device)
    if exchange(ring, _WHAT, place) is not None:
        return None, place if memory is None else "they are not on one host, or another rank has none to share"
    if memory is None:
        return None, place
    reason = ""
    try:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.rendezvous(memory, ring.groups[0])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    alike = exchange(ring, _WHAT, reason) is None
    return memory, reason if alike or reason else "another rank cannot"


def _empty(device: torch.device) -> tuple[Tensor | None, str]:
    """Symmetric memory, and where its process is: on which host, in which namespaces. None and the reason where there is none."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(_NUMBERS, dtype=torch.float32, device=device)
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt", "net")]
        return memory, " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    except Exception as error:  # whatever it is, NCCL gathers, too
        return None, f"{type(error).__name__}: {error}"
