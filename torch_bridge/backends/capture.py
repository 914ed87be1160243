"""Runs that are no steps: torch records a CUDA graph, or runs a pipeline's stage for its shapes."""

import sys
from types import FrameType

import torch

FIRST_CALL = (
    "a ring call is compared between the ranks when it is made for the first time: make it once before it is captured in a "
    "CUDA graph (calls that JAX computes, all but decoding, cannot be captured at all)"
)

CAPTURED = (
    "what JAX computes cannot be captured in a CUDA graph, and this ring call is computed by JAX; leave it out of the capture"
)


def is_captured(device: torch.device) -> bool:
    """Whether torch records its stream's work in a CUDA graph, in place of doing it."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):  # to enter a device takes longer than to ask
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def shapes_only() -> bool:
    """Whether torch.distributed.pipelining runs a stage on uninitialised memory, perhaps equal on all ranks, for its shapes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None
