"""Dispatch from a tensor's device type to its backend; no other module decides this.

Importing this module loads neither JAX nor torch-xla nor torch-tpu.
"""

import torch

from torch_bridge.backends import shared_memory
from torch_bridge.backends.interface import Backend


def backend_of(device: torch.device) -> Backend:
    """The backend of tensors on ``device``. Uses import statements because torch.compile can trace them."""
    if device.type == "xla":
        from torch_bridge.backends import torch_xla

        return torch_xla
    if device.type == "tpu":
        from torch_bridge.backends import torch_tpu

        return torch_tpu

    return shared_memory
