"""What the ranks of a ring have found, so that all of them come to the same verdict."""

import torch
from torch import Tensor

from ring_attn.sharding.reduction import gather_from_ring, sum_over_ring
from ring_attn.verification.verdict import largest
from torch_bridge.mesh.rings import ProcessRing

CALL = "verify: the comparison of the ranks"
_STEP = "verify"
_PIECE = 2**24  # elements that are gathered at a time


def everywhere(true: bool, ring: ProcessRing, device: torch.device) -> bool:
    """Whether it is true on all ranks of the ring."""
    return largest_of_all([float(not true)], ring, device) == [0]


def largest_of_all(numbers: list[float], ring: ProcessRing, device: torch.device) -> list[float]:
    """Each number's largest value on any rank; NaN is infinite. ``device``: one that the ring's collectives take tensors from."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device).nan_to_num(nan=torch.inf)
    return gather_from_ring(mine, ring, _STEP, CALL).amax(0).tolist() if numbers else []


def of_rank_0(tensor: Tensor, ring: ProcessRing) -> Tensor:
    pieces = tensor.reshape(-1).split(_PIECE) if tensor.numel() else ()
    gathered = [gather_from_ring(piece, ring, _STEP, CALL)[0] for piece in pieces]
    return torch.cat(gathered).view(tensor.shape) if gathered else tensor


def off_by(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return largest(actual - expected) / max(largest(expected), 1e-30)


def known_cause(actual: Tensor, expected: Tensor, ring: ProcessRing, allowed: float) -> str:
    """Why all gradients of this rank (flat, in one order) are not what they must be, where that is simply told; empty where it is
    not. Collective."""
    device = actual.device
    total = sum_over_ring(actual, ring, _STEP, CALL)
    (off,) = largest_of_all([off_by(actual, expected)], ring, device)
    if not everywhere(off_by(actual, of_rank_0(actual, ring)) <= allowed, ring, device):
        if everywhere(off_by(total, expected) <= allowed, ring, device):
            return (
                f"the gradients were not summed over the ring: each rank's are its own tokens' part, off by {off:.1e}, and the "
                "parts add up to what one process has. Sum them once, after the last backward(): sync_gradients, or the "
                "ContextParallel's reduce_gradients()"
            )
        return ""
    (factor,) = largest_of_all([float((actual * expected).sum() / expected.square().sum().clamp_min(1e-30))], ring, device)
    if abs(factor - 1) <= allowed or not everywhere(off_by(actual, expected * factor) <= allowed, ring, device):
        return ""
    return f"the gradients are {factor:.4g} times what they must be: {_of_factor(factor, ring.size, allowed)}"


def _of_factor(factor: float, size: int, allowed: float) -> str:
    if abs(factor - size) <= allowed * size:
        return "summed twice, or the loss is divided by one rank's labels and not by those of the whole ring"
    if abs(factor - 1 / size) <= allowed / size:
        return (
            "averaged over the ring and not summed; or multiplied in one process too by the size of a mesh that was made outside "
            "the step: multiply by ring.size"
        )
    return "the loss is divided by another number than that of all labels, or clipped or scaled in another way"
