"""A transformers model on a ring that is called with whole batches: what stands between it and a trainer that knows of no ring."""

import inspect
from collections.abc import MutableMapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn.integrations.transformers import context_parallel
from ring_attn.ring import Ring


class _Call(NamedTuple):
    """A call with labels: the shape of the whole batch and of the shard, and whether the loss is to be a mean."""

    whole: torch.Size
    shard: torch.Size
    mean: bool


class WholeBatches:
    """Hooks on ``model`` by which all ranks of a ring call it with one and the same whole batch, and each computes its shard of it.

    In: ``input_ids`` and ``labels`` ``[batch, seq]``, int64, whole sequences of any length in natural order, and what else
    :meth:`ContextParallel.shard` takes. Out:

    - ``loss``, the same on all ranks of the ring: the mean over the whole batch's labels. With ``num_items_in_batch`` given, which
      counts the labels of the batches of all data-parallel ranks and accumulated steps, each once: the sum over this batch's labels,
      divided by it and by the ring's size, so that it adds up over all ranks, as the Trainer expects.
    - gradients, whose average over all ranks (DDP, FSDP) is that of the loss; with ``num_items_in_batch``, whose sum is.
    - outputs of one number a token: whole, ``[batch, seq]``; with ``num_items_in_batch`` those of the shard.
    - logits, hidden states and all other tensors that are sharded: not to be had, as they would be taken for the whole batch's.

    Without labels the model runs unsharded, as in ``generate``; where gradients are wanted this is refused, as the ring would idle.

    Raises ValueError where the ranks of the ring hold different batches, NotImplementedError for training without labels.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, layout: str) -> None:
        self._parallel = context_parallel(model, mesh, layout=layout)
        self._ring = Ring(mesh, layout=layout)
        self._call: _Call | None = None
        model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after)

    @torch.compiler.disable
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
        self._call = None
        parameters = inspect.signature(model.forward).parameters
        kwargs = dict(zip(parameters, args, strict=False)) | kwargs
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            if torch.is_grad_enabled() and model.training:
                raise NotImplementedError(_NO_LABELS)
            return None
        self._check_same([x for x in kwargs.values() if isinstance(x, Tensor) and not x.is_floating_point() and x.ndim])
        items = kwargs.pop("num_items_in_batch", None)
        batch = self._parallel.shard(kwargs)
        labels = "shift_labels" if kwargs.get("labels") is None else "labels"
        self._call = _Call(kwargs[labels].shape, batch[labels].shape, mean=items is None)
        batch["num_items_in_batch"] = batch["num_items_in_batch"] / self._ring.size if items is None else items
        return (), batch

    @torch.compiler.disable
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._call is None:
            return output
        if not isinstance(output, MutableMapping):
            raise NotImplementedError("return_dict=False: outputs of a model on a ring are told apart by name; leave return_dict at True")
        call, self._call = self._call, None
        for name, value in output.items():
            output[name] = self._outside(name, value, call)
        return output

    def _outside(self, name: str, value: Any, call: _Call) -> Any:
        """What a caller with a whole batch may see of one output."""
        if not isinstance(value, Tensor | tuple):
            return value
        if isinstance(value, Tensor) and value.ndim == 0:
            return _RingMean.apply(value, self._ring)
        if isinstance(value, Tensor) and value.shape == call.shard:
            return _Whole.apply(value, self._ring, call.whole[1]) if call.mean else value
        return StaysSharded(name)

    def _check_same(self, ids: list[Tensor]) -> None:
        mine = torch.stack([_checksum(tensor) * place for place, tensor in enumerate(ids, 1)]).sum()
        everywhere = [torch.empty_like(mine) for _ in range(self._ring.size)]
        dist.all_gather(everywhere, mine, group=self._ring.group)
        if any(other.item() != mine.item() for other in everywhere):
            raise ValueError(
                "the ranks of a ring hold different batches, and each must hold the same: let the Accelerator that has the "
                "RingParallelism prepare the data loader, or sample by data-parallel ranks, not by processes"
            )


def _checksum(ids: Tensor) -> Tensor:
    """int64, of the shape and of the values at their places."""
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    return ((ids.flatten().long() + 1) * places).sum() + hash(tuple(ids.shape)) % (1 << 31)


class StaysSharded:
    """In the place of an output that is sharded over the ring: any use of it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise NotImplementedError(
            f"the model's {self._name} are sharded over the ring and never whole on a rank: a loss or metric computed from them outside of "
            "the model (compute_metrics, predict, compute_loss_func, label smoothing) is not possible here. For a loss of your own, call "
            "the model with shards: ring_attn.integrations.transformers.context_parallel"
        )

    def __reduce__(self) -> NoReturn:
        self.__getattr__("__reduce__")


class _RingMean(torch.autograd.Function):
    """The mean of a number over the ring, for each rank to see; the gradient is that of the rank's own number."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, ring: Ring) -> Tensor:
        mean = number.clone()
        dist.all_reduce(mean, group=ring.group)
        return mean / ring.size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Whole(torch.autograd.Function):
    """The whole sequence of one number a token. A rank's gradient is that of its own shard, times the size of the ring."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, ring: Ring, length: int) -> Tensor:
        ctx.ring = ring
        return ring.unshard(shard, length=length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ring.shard(ctx.ring.pad(gradient)) * ctx.ring.size, None, None


_NO_LABELS = (
    "a model on a ring is trained by the loss that it computes itself, and this batch has no labels: the trainer computes the loss from "
    "the logits (label smoothing, compute_loss_func, a loss on preferences), which are never whole on a rank. Let the model compute "
    "the loss, or call it with shards in a loop of your own: ring_attn.integrations.transformers.context_parallel"
)
