"""A transformers model on a ring that is called with whole batches: what stands between it and a trainer that knows of no ring."""

from collections.abc import Callable, MutableMapping
from functools import wraps
from inspect import signature
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ring_attn.integrations.transformers import ContextParallel
from ring_attn.integrations.transformers.batch.sharding import Inputs, ModelInputs
from torch_bridge.tracing import untraced

_FUSED = "fused_lm_head"  # how TRL asks the model for one number a token in the place of logits
_ASKED_BY_SFT = {"log_probs", "entropy", "is_top1"}
_ASKED_BY_TRL = {*_ASKED_BY_SFT, "mean_logits", "log_sum_sq_probs"}


class _Call(NamedTuple):
    """A forward under way: the batch as it is sharded, whether the caller counted the labels, what TRL's head gets."""

    batch: ModelInputs
    counted: bool
    fused: ModelInputs


class WholeBatches:
    """Hooks on a context-parallel model, by which all ranks of a ring call it with one and the same whole batch, and each computes
    its shard of it.

    In: what :meth:`ContextParallel.shard` takes, ``labels`` included. Out:

    - ``loss``: that of the whole batch, the mean over its labels, the same on all ranks of the ring. With ``num_items_in_batch``,
      the count of the labels of all batches of a step, each once: the batch's sum divided by it and by the ring's size, a share
      that adds up over all ranks, as the Trainer expects.
    - gradients, whose mean over the ring (DDP's, FSDP's) is that of the loss; with ``num_items_in_batch``, whose sum is.
    - logits, hidden states and all else that is sharded: not to be had, as they would be taken for the whole batch's.
    - for TRL's SFTTrainer, one number a token: whole, ``[batch, seq]``, where no gradient is wanted; else those of the shard.

    Raises ValueError where the ranks of the ring hold different batches, NotImplementedError for a batch without labels.
    """

    def __init__(self, parallel: ContextParallel) -> None:
        self._parallel, self._ring = parallel, parallel.ring
        self._call: _Call | None = None
        inner = self._parallel.model
        self._hooks = [
            inner.register_forward_pre_hook(self._shard, prepend=True, with_kwargs=True),
            inner.register_forward_pre_hook(self._give_labels, with_kwargs=True),
            inner.register_forward_hook(self._answer),
        ]

    def remove(self) -> None:
        """Makes the model what it was before."""
        for hook in self._hooks:
            hook.remove()
        self._parallel.remove()

    @untraced
    def _shard(self, model: nn.Module, args: tuple[object, ...], kwargs: ModelInputs) -> Inputs | None:
        self._call = None
        if self._parallel.off:
            return None
        batch = dict(zip(signature(model.forward).parameters, args, strict=False)) | kwargs
        labels = next((batch[name] for name in ("labels", "shift_labels") if batch.get(name) is not None), None)
        if labels is None:
            raise NotImplementedError(_NO_LABELS)
        counted, fused = batch.get("num_items_in_batch") is not None, batch.pop(_FUSED, False)
        if fused and batch.get("output_router_logits"):
            raise NotImplementedError(_NO_ROUTERS)
        batch = self._parallel.shard(batch)
        late = {name: batch.pop(name) for name in ("labels", "shift_labels")} if fused else {}
        self._call = _Call(dict(batch), counted, late)
        return (), batch

    def _give_labels(self, model: nn.Module, args: tuple[object, ...], kwargs: ModelInputs) -> Inputs:
        """TRL's head scores the labels by itself; it gets them here, after the hook by which other models get no labels."""
        if self._call is None or not self._call.fused:
            return args, kwargs
        return args, {**kwargs, **self._call.fused, _FUSED: True}

    @untraced
    def _answer(self, model: nn.Module, args: object, output: object) -> object:
        if self._call is None:
            return output
        call, self._call = self._call, None
        if not isinstance(output, MutableMapping):
            raise NotImplementedError("return_dict=False: on a ring outputs are told apart by name; leave return_dict at True")
        answer = self._of_tokens(call, output) if call.fused else {"loss": self._averaged(call, output["loss"])}
        for name, value in output.items():
            sharded = name not in answer and isinstance(value, Tensor | tuple)
            output[name] = ShardedOutput(name) if sharded else answer.get(name, value)
        if self._parallel.levers.loss_chunk is not None and not call.fused:
            output["logits"] = ShardedOutput("logits")  # of which only a few existed at a time
        return output

    def _averaged(self, call: _Call, loss: Tensor) -> Tensor:
        """From the loss of the ring with the gradient of this rank's share of it."""
        gradient, value = (1.0, 1.0 / self._ring.size) if call.counted else (float(self._ring.size), 1.0)
        return loss * gradient + loss.detach() * (value - gradient)

    def _of_tokens(self, call: _Call, output: MutableMapping[str, Tensor]) -> dict[str, Tensor]:
        if {name for name in _ASKED_BY_TRL if output.get(name) is not None} != _ASKED_BY_SFT:
            raise NotImplementedError(_ONLY_SFT)
        mask = output["label_mask"]
        tokens = {name: value for name, value in output.items() if isinstance(value, Tensor) and value.shape == mask.shape}
        if torch.is_grad_enabled():
            return tokens
        return {name: self._parallel.unshard(value, call.batch) for name, value in tokens.items()}


class ShardedOutput:
    """In the place of an output that is sharded over the ring: any use of it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise NotImplementedError(
            f"the model's {self._name} are sharded over the ring, never whole on a rank: a loss or metric made from them outside "
            "of the model (compute_metrics, predict, compute_loss_func, label smoothing) cannot be had. To evaluate by the loss, "
            "set prediction_loss_only=True in the TrainingArguments. For metrics of logits use a loop of your own on shards: "
            "ring_attn.integrations.transformers.context_parallel"
        )

    def __reduce__(self) -> NoReturn:
        self.__getattr__("__reduce__")


def reject_sharded(pad: Callable[..., object]) -> Callable[..., object]:
    """accelerate's function to which the Trainer gives a model's outputs, whose own words would be of an unknown type."""

    @wraps(pad)
    def padded(outputs: object, *arguments: object, **options: object) -> object:
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, ShardedOutput):
                output.gathered()  # raises
        return pad(outputs, *arguments, **options)

    return padded


_NO_LABELS = (
    "a model on a ring computes its loss itself, and this batch has no labels: a loss made from logits outside of the model (label "
    "smoothing, compute_loss_func, preferences) would need all logits on each rank. Have the model compute the loss, or call it "
    "with shards in a loop of your own: ring_attn.integrations.transformers.context_parallel. To generate: model.generate"
)
_NO_ROUTERS = (
    "TRL's auxiliary loss of a mixture of experts is made of the router logits of all tokens, and a rank has those of its own; set "
    "router_aux_loss_coef=0.0 in the SFTConfig, or train with transformers' Trainer"
)
_ONLY_SFT = (
    "of TRL's trainers, the SFTTrainer works on a ring: the others make their loss from sums over whole sequences, and a rank has "
    "its own tokens only"
)
