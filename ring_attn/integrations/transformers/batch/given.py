"""What a model is given beside, or in the place of, what its ``cp.shard`` made."""

from collections.abc import Mapping

from torch import Tensor

from ring_attn.integrations.transformers.batch.entries import REFUSED
from ring_attn.integrations.transformers.batch.sharding import ModelInputs
from ring_attn.integrations.transformers.calls import Items, Sharded
from ring_attn.integrations.transformers.generation.cache import RingCache
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.sequence import IGNORED
from ring_attn.sharding.marks import is_shard

CHANGED = "Change the whole batch before cp.shard, which keeps positions and shifted labels in the order of the layout"
_LABELS = ("labels", "shift_labels")  # which a caller may keep for cp.loss


def check_given(plan: Plan, sharded: Sharded, options: Mapping[str, object]) -> None:
    """ValueError and NotImplementedError, by name of the entry."""
    for name in REFUSED:
        value = options.get(name)
        if not (value is None or value is False or isinstance(value, RingCache) or name == plan.whole_encoder):
            raise NotImplementedError(f"{name} cannot be given to a model with a sharded batch: {REFUSED[name]}")
    ignored = options.get("ignore_index")
    if ignored not in (None, IGNORED):
        raise ValueError(
            f"ignore_index must be {IGNORED}, by which labels are sharded and losses made here, got {ignored}; give cp.shard the "
            f"labels that do not count as {IGNORED}"
        )
    mask = None if plan.whole_encoder else options.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not is_shard(mask) and bool(mask.ne(1).any()):
        raise ValueError("the attention mask of a sharded batch was changed; give the whole mask to cp.shard")
    missing = [name for name in sharded.entries if name not in _LABELS and options.get(name) is None]
    if missing and missing[0] == "input_ids" and options.get("inputs_embeds") is not None:
        raise ValueError(f"inputs_embeds took the place of input_ids in a sharded batch, as by PEFT's prompt tuning. {CHANGED}")
    if missing:
        raise ValueError(f"{missing[0]} was taken out of a sharded batch: the model would make its own of this rank's tokens")
    check_labels(plan, sharded, options)


def check_labels(plan: Plan, sharded: Sharded, given: Mapping[str, object]) -> None:
    """Labels beside a batch that was sharded without any: nobody knows whether they were shifted."""
    unknown = "labels" not in sharded.entries and given.get("labels") is not None and given.get("shift_labels") is None
    if unknown and plan.shifts_labels:
        raise ValueError(
            "labels were given beside a batch that was sharded without them: a token's label is the token after it, which may "
            "be on another rank. Give the whole labels to cp.shard, which shifts them before it cuts them; or those that you "
            "shifted before you cut them as shift_labels"
        )


def taken(sharded: Sharded, options: ModelInputs) -> tuple[Tensor | None, Items]:
    """Takes out of a model's inputs what the loss is made of, which the model would use by itself."""
    options.pop("ignore_index", None)
    items, shifted = options.pop("num_items_in_batch", None), options.pop("shift_labels", None)
    labels = options.pop("labels", None)
    return labels if shifted is None else shifted, sharded.items if items is None else items
