"""The table of a placement's pieces, as kernels take it."""

import torch

from ring_attn.documents.table import Documents as Table
from ring_attn.packed.documents import Documents
from ring_attn.packed.placement import Placement
from ring_attn.sharding.marks import ranks_of
from torch_bridge.mesh.protocol import AnyRing


def piece_table(placement: Placement, documents: Documents, total: int, ring: AnyRing, device: torch.device) -> Table | None:
    """The table of its pieces, where one says all, over ``total`` places."""
    pieces = placement.table if documents.in_one_piece else None
    if pieces is None:
        return None
    shared = placement.shared_eighths(total // ring.size)
    return Table(torch.from_numpy(pieces).to(device), len(documents.tokens) < total, ranks_of(ring), shared)
