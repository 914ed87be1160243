"""Do all processes of a ring ask for the same of torch's own collectives? Unequal calls hang or give wrong numbers.

Ring calls are compared by :func:`torch_bridge.calls.compare`, once JAX has started.
"""

import hashlib

import torch
import torch.distributed as dist

from torch_bridge.mesh import Ring


def check_agreement(ring: Ring, call: str, must: str, device: torch.device) -> None:
    """Raises ValueError on every rank, with each one's ``call`` in it, unless all are equal; ``must`` says what has to hold and
    what to do. A collective call of the ring, of one number a rank where they agree."""
    if ring.size == 1:
        return
    # A hash is one number whatever the call, so that comparing needs no agreement itself.
    digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:8], "big", signed=True)
    digests = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ring.size)]
    dist.all_gather(digests, torch.tensor([digest], device=device), group=ring.group)
    if bool((torch.cat(digests) == digest).all()):
        return
    calls: list[str | None] = [None] * ring.size
    dist.all_gather_object(calls, call, group=ring.group)
    raise ValueError(f"{must}; got " + "; ".join(f"ring rank {rank}: {other}" for rank, other in enumerate(calls)))
