"""What stands in for an accelerator under torchtitan, which knows no CPU. To be imported before torchtitan."""

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils as utils  # noqa: E402
import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.models.llama3.parallelize as parallelize  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh  # noqa: E402


class NoMemory:
    """Stands for the monitor of an accelerator's memory."""

    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo refuses
attention._compiled_create_block_mask = create_block_mask
# The spmd_types backend leaves parameters plain tensors with annotations, which torch 2.13's fully_shard does not know yet: plain
# FSDP2 over the same ranks.
parallelize.resolve_fsdp_mesh = lambda dims: (
    resolve_fsdp_mesh(dims)
    if dims.spmd_backend == "full_dtensor"
    else (dims.get_activated_mesh(["loss"]) or dims.get_mesh("dp_shard"), None)
)
