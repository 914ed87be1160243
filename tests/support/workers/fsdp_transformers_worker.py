"""A transformers model under FSDP2 and DDP on a ring of two: gradients of one process, of its own loss and of a loss in chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from readme_worker import tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn.integrations.transformers import ContextParallel, context_parallel

Batch = dict[str, Tensor]
KEPT: list[nn.Module] = []  # what must live until the backward


class InChunks(nn.Module):
    """The loss, of the base model's hidden states."""

    def __init__(self, model: Any, cp: ContextParallel) -> None:
        super().__init__()
        self.model, self.cp = model, cp

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.model.model(**batch).last_hidden_state
        return self.cp.loss(torch.cat([self.model.lm_head(chunk) for chunk in hidden.split(3, dim=1)], 1), batch)


def sharded(mesh: DeviceMesh, model: Any, *roots: nn.Module) -> Any:
    for part in (*model.model.layers, *roots):
        fully_shard(part, mesh=mesh)
    return roots[-1]


def fsdp_first(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    sharded(mesh, model, model)
    return model(**context_parallel(model, mesh).shard(batch)).loss


def ring_first(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh)
    return sharded(mesh, model, model)(**cp.shard(batch)).loss


def fsdp_first_and_loss_chunk(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    sharded(mesh, model, model)
    return model(**context_parallel(model, mesh, loss_chunk=3).shard(batch)).loss


def loss_chunk_and_fsdp(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh, loss_chunk=3)
    return sharded(mesh, model, model)(**cp.shard(batch)).loss


def fsdp_of_the_root_alone_first_and_loss_chunk(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    """No other part's hooks begin the backward, so the loss has to lead to the root's."""
    fully_shard(model, mesh=mesh)
    return model(**context_parallel(model, mesh, loss_chunk=3).shard(batch)).loss


def fsdp_that_reshards_and_loss_chunk(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model(**context_parallel(model, mesh, loss_chunk=3).shard(batch)).loss


def loss_chunk_and_fsdp_of_base_and_root(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh, loss_chunk=3)
    fully_shard(model.model, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model(**cp.shard(batch)).loss


def every_lever_and_fsdp(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded(mesh, model, model)
    return model(**context_parallel(model, mesh, checkpoint="offload", loss_chunk=3, mlp_tile=3).shard(batch)).loss


def mlp_tile_and_fsdp(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh, mlp_tile=3)
    return sharded(mesh, model, model)(**cp.shard(batch)).loss


def fsdp_of_the_mlps_and_mlp_tile(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
    sharded(mesh, model, model)
    return model(**context_parallel(model, mesh, mlp_tile=3).shard(batch)).loss


def ddp_and_mlp_tile(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    wrapper = DistributedDataParallel(model)
    KEPT.append(wrapper)
    return wrapper(**context_parallel(wrapper, mesh, mlp_tile=3).shard(batch)).loss


def ddp_and_loss_chunk(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    wrapper = DistributedDataParallel(model)
    KEPT.append(wrapper)
    return wrapper(**context_parallel(wrapper, mesh, loss_chunk=3).shard(batch)).loss


def fsdp_around_chunks(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh)
    return sharded(mesh, model, InChunks(model, cp))(cp.shard(batch))


def fsdp_of_the_base_model(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    """And of the head, without a root."""
    sharded(mesh, model, model.model, model.lm_head)
    cp = context_parallel(model, mesh)
    return InChunks(model, cp)(cp.shard(batch))


def fsdp_lends_its_call(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(sharded(mesh, model, model), mesh)
    return lent(model, model, InChunks(model, cp), cp.shard(batch))


def ddp_around_chunks(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    cp = context_parallel(model, mesh)
    wrapper = DistributedDataParallel(InChunks(model, cp))
    KEPT.append(wrapper)
    return wrapper(cp.shard(batch))


def ddp_lends_its_call(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    wrapper = DistributedDataParallel(model)
    cp = context_parallel(wrapper, mesh)
    return lent(wrapper, model, InChunks(model, cp), cp.shard(batch))


def ddp_lends_it_to_forward(model: Any, mesh: DeviceMesh, batch: Batch) -> Tensor:
    wrapper = DistributedDataParallel(model)
    cp = context_parallel(wrapper, mesh)
    return lent(wrapper, model, lambda batch: model.forward(**batch).loss, cp.shard(batch))


def lent(wrapper: nn.Module, model: Any, function: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """The function, called by the wrapper in the place of the model; TRL's ``_ForwardRedirection``."""
    forward = model.forward

    def instead(batch: Batch) -> Tensor:
        model.forward = forward
        return function(batch)

    model.forward = instead
    return wrapper(batch)


class Gatherings(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def gathered(layers: bool, mesh: DeviceMesh, batch: Batch, **levers: Any) -> int:
    """How often parameters are gathered in a step of a model in activation checkpoints."""
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _ = sharded(mesh, model, model) if layers else fully_shard(model, mesh=mesh)
    cp = context_parallel(model, mesh, **levers)
    with Gatherings() as seen:
        model(**cp.shard(batch)).loss.backward()
    return seen.count


WAYS = (
    fsdp_first,
    ring_first,
    fsdp_first_and_loss_chunk,
    loss_chunk_and_fsdp,
    fsdp_of_the_root_alone_first_and_loss_chunk,
    fsdp_that_reshards_and_loss_chunk,
    loss_chunk_and_fsdp_of_base_and_root,
    every_lever_and_fsdp,
    mlp_tile_and_fsdp,
    fsdp_of_the_mlps_and_mlp_tile,
    ddp_and_mlp_tile,
    ddp_and_loss_chunk,
    fsdp_around_chunks,
    fsdp_of_the_base_model,
    fsdp_lends_its_call,
    ddp_around_chunks,
    ddp_lends_its_call,
    ddp_lends_it_to_forward,
)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    whole = tiny()
    expected = whole(**batch).loss
    expected.backward()
    for way in WAYS:
        model = tiny()
        loss = way(model, mesh, batch)
        (loss * mesh.size()).backward()  # FSDP and DDP take the mean over the ranks
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        for (name, own), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            grad = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        print(f"{way.__name__}: as one process", flush=True)
    for layers in (True, False):
        usual = gathered(layers, mesh, batch)
        assert usual > 0 and gathered(layers, mesh, batch, mlp_tile=3) == usual
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer.mlp.down_proj, mesh=mesh)
    with pytest.raises(NotImplementedError, match="LlamaMLP is in FSDP2 by itself, and would be gathered once a tile"):
        mlp_tile_and_fsdp(model, mesh, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
