"""Dispatch from a tensor's device type to its road; no other module decides this.

Importing this module loads neither JAX nor torch-xla nor torch-tpu.
"""

import torch

from torch_bridge.road import Road


def road_of(device: torch.device) -> Road:
    """The road of tensors on ``device``. Uses import statements because torch.compile can trace them."""
    if device.type == "xla":
        from torch_bridge import torch_xla

        return torch_xla
    if device.type == "tpu":
        from torch_bridge import torch_tpu

        return torch_tpu
    from torch_bridge import dlpack_road

    return dlpack_road
