"""``head_groups``: in how many groups of K/V heads a model's attention is computed; with "auto" as the formula of memory says."""

from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_attn.arguments.head_groups import check_head_groups
from ring_attn.integrations.transformers.model.checkpointing import is_checkpointed
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
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # of configurations


class HeadGroups:
    """The number that ``levers`` have; or, with "auto", the fewest groups with which a step of training fits on the GPU by
    :mod:`ring_attn.memory.formula`, chosen once for each number of tokens and the same on all ranks. One where none fit, on a CPU,
    and with attention's dropout, which takes no groups.

    Raises ValueError for what is no number, and with "auto" for a model whose sizes are not known, NotImplementedError for one
    whose attention's memory is not.
    """

    def __init__(self, model: PreTrainedModel, ring: Ring, levers: Levers) -> None:
        self._model, self._ring, self._levers = model, ring, levers
        self._shapes: Shapes | None = shapes_of(model)[1] if levers.head_groups == "auto" else None
        self._chosen: dict[int, int] = {}  # by tokens
        check_groups_or_auto(levers.head_groups)

    @property
    def _config(self) -> dict[str, Any]:
        return vars(self._model.config.get_text_config())

    def of(self, tokens: Tensor) -> int:
        """For a forward on this rank's ``tokens [batch, local]``. With "auto" collective where their number is new."""
        if self._shapes is None or not torch.is_grad_enabled() or (memory := memory_of(tokens.device)) is None:
            return self._levers.groups
        if self._model.training and any(self._config.get(name) for name in _DROPOUT):
            return 1
        count = tokens.numel()
        if count not in self._chosen:
            # Layers of one model may differ.
            heads = gcd(*(n for name, n in self._config.items() if name.endswith("key_value_heads") and n), self._shapes.kv_heads)
            chosen, ring = fewest_groups(self._shapes, self._setting, count, memory, heads), self._ring.processes
            if ring.size > 1:
                agree(ring, tokens.device, f"{chosen} groups of heads for {count} tokens a rank", _SAME)
            self._chosen[count] = chosen
        return self._chosen[count]

    @property
    def _setting(self) -> Setting:
        weights = next((x for x in self._model.parameters() if isinstance(x, DTensor)), None)
        over = () if weights is None else zip(weights.device_mesh.shape, weights.placements, strict=True)
        gpus = prod(size for size, placement in over if placement.is_shard())
        checkpointed = any(is_checkpointed(module) for module in self._model.modules())
        return Setting(gpus, weights is not None, checkpointed, self._levers)


def check_groups_or_auto(groups: object) -> None:
    if groups != "auto":
        check_head_groups(groups)


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
