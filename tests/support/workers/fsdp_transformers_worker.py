"""A transformers model under FSDP2 on a ring of two, wrapped before and after context_parallel: gradients of one process."""

import torch
import torch.distributed as dist
from readme_worker import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_attn.integrations.transformers import context_parallel


def sharded(model, mesh):
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    whole = tiny()
    expected = whole(**batch).loss
    expected.backward()
    for order in ("FSDP first", "ring first"):
        model = tiny()
        if order == "FSDP first":
            sharded(model, mesh)
        cp = context_parallel(model, mesh)
        if order == "ring first":
            sharded(model, mesh)
        loss = model(**cp.shard(batch)).loss
        (loss * mesh.size()).backward()  # FSDP takes the mean over the ranks
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        for (name, own), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            grad = own.grad.full_tensor()
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        print(f"{order}: as one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
