"""``head_groups``: in how many groups of K/V heads a model's attention is computed; with "auto" as the plan of memory says."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_attn.arguments.head_groups import check_head_groups
from ring_attn.integrations.transformers.versions import PreTrainedModel
from ring_attn.memory import Levers, Setting, Shapes
from ring_attn.memory.planning import fewest_groups
from ring_attn.memory.shapes import shapes_of
from ring_attn.ring import Ring
from ring_attn.sharding.reduction import agree

_SAME = (
    'head_groups="auto" must come to the same number on all ranks of a ring, whose GPUs then have the same memory; give a number '
    "instead"
)


class HeadGroups:
    """The number that ``levers`` have; or, with "auto", the fewest groups with which a step of training fits on the GPU by
    :mod:`ring_attn.memory.formula`, chosen once for each number of tokens and the same on all ranks. On a CPU that is one.

    Raises ValueError for what is no number, and with "auto" for a model whose sizes are not known, NotImplementedError for one
    whose attention's memory is not.
    """

    def __init__(self, model: PreTrainedModel, ring: Ring, levers: Levers) -> None:
        self._model, self._ring, self._levers = model, ring, levers
        self._shapes: Shapes | None = shapes_of(model)[1] if levers.head_groups == "auto" else None
        self._chosen: dict[int, int] = {}  # by tokens
        if self._shapes is None:
            check_head_groups(levers.head_groups)

    def of(self, tokens: Tensor) -> int:
        """For a forward on this rank's ``tokens [batch, local]``. With "auto" collective where their number is new."""
        memory = memory_of(tokens.device)
        if self._shapes is None or memory is None or not torch.is_grad_enabled():
            return self._levers.groups
        count = tokens.numel()
        if count not in self._chosen:
            chosen, ring = fewest_groups(self._shapes, self._setting, count, memory), self._ring.processes
            if ring.size > 1:
                agree(ring, tokens.device, f"{chosen} groups of heads for {count} tokens a rank", _SAME)
            self._chosen[count] = chosen
        return self._chosen[count]

    @property
    def _setting(self) -> Setting:
        weights = next((x for x in self._model.parameters() if isinstance(x, DTensor)), None)
        gpus = 1 if weights is None else weights.device_mesh.size()
        checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in self._model.modules())
        return Setting(gpus, weights is not None, checkpointed, self._levers)


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
