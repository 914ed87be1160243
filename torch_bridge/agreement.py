"""Checks that all ranks of a ring make the same call before it enters torch's own collectives: unequal calls hang or give wrong
numbers.

Ring calls are compared by :func:`torch_bridge.calls.compare` once JAX has started.
"""

import hashlib

import torch
import torch.distributed as dist

from torch_bridge.mesh import Ring


def check_agreement(ring: Ring, call: str, must: str, device: torch.device) -> None:
    """Raises ValueError on every rank, listing each rank's ``call``, unless all are equal. ``must`` says what has to hold and what
    to do. A collective of the ring; it sends one number per rank when they agree."""
    if ring.size == 1:
        return
    # The hash is one number whatever the call is, so the comparison itself needs no agreement on shapes.
    digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:8], "big", signed=True)
    digests = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ring.size)]
    dist.all_gather(digests, torch.tensor([digest], device=device), group=ring.group)
    if bool((torch.cat(digests) == digest).all()):
        return
    calls: list[str | None] = [None] * ring.size
    dist.all_gather_object(calls, call, group=ring.group)
    raise ValueError(f"{must}; got " + "; ".join(f"ring rank {rank}: {other}" for rank, other in enumerate(calls)))
