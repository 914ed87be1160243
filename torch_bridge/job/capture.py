"""CUDA graphs: whether torch is recording one, and whether a step of decoding can be one."""

import torch

# Not yet: decoding by torch's own launches was compiled for GPUs and run in Triton's interpreter, but not on one.
DECODES_ON_GPUS = False


def is_captured(device: torch.device) -> bool:
    """Whether torch records its stream's work in a CUDA graph, in place of doing it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
