"""What composes with a ring, case after case, in float64: the gradients must be those of one process with torch's attention.

Run by tests/ring_attn/test_parallelism.py on four ranks, which also save a checkpoint, and on two, which also load it.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoder import (
    Decoder,
    assert_same,
    decoder,
    gradients,
    number_of_labels,
    parameters,
    rows,
    whole_step,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ring_attn
from ring_attn import Ring, cross_entropy, sync_gradients
from torch_bridge.failures import peers

LAYOUT = "zigzag"


def expected() -> Decoder:
    model = decoder(None)
    whole_step(model)
    return model


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def ring_of(mesh: DeviceMesh) -> Ring:
    return Ring(mesh, mesh_dim="cp", layout=LAYOUT)


def local_loss(model: nn.Module, ring: Ring, part: int = 0, parts: int = 1) -> Tensor:
    """This rank's part of the loss: the parts of all ranks add up to it."""
    batch = rows(ring, part, parts)
    return cross_entropy(model(batch.input_ids), batch, num_items=number_of_labels())


def sharded(model: Decoder, mesh: DeviceMesh, **options: object) -> Decoder:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def divide_by_one(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums; NCCL does without


# Four ranks.


def ddp(mesh: DeviceMesh) -> None:
    """DDP averages over its ranks: the loss is multiplied by their number. What it has not summed, sync_gradients sums."""
    ring = ring_of(mesh)
    for group, size, over_cp in ((None, mesh.size(), False), (mesh.get_group("dp"), mesh["dp"].size(), True)):
        model = DistributedDataParallel(decoder(ring), process_group=group)
        (local_loss(model, ring, mesh.get_local_rank("dp"), mesh["dp"].size()) * size).backward()
        if over_cp:
            sync_gradients(model, ring=ring)
        assert_same(gradients(model), gradients(expected()))


def fsdp2(mesh: DeviceMesh) -> None:
    """So does FSDP2 over dp x cp, unless it is told not to divide; in float32 it leaves the division to the process group."""
    ring, flat = ring_of(mesh), mesh["dp", "cp"]._flatten("dp_cp")
    part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    for dtype in (torch.float64, torch.float32):
        model = sharded(decoder(ring).to(dtype), flat)
        blocks = list(model.blocks.values())
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])  # the next all-gather is under way during a ring call
        (local_loss(model, ring, part, parts) * mesh.size()).backward()
        assert_same(gradients(model), gradients(expected()))
        model.zero_grad()
        divide_by_one(model)
        local_loss(model, ring, part, parts).backward()
        assert_same(gradients(model), gradients(expected()))


def hsdp(mesh: DeviceMesh) -> None:
    """Replicated over dp, sharded over cp."""
    ring = ring_of(mesh)
    model = sharded(decoder(ring), mesh)
    (local_loss(model, ring, mesh.get_local_rank("dp"), mesh["dp"].size()) * mesh.size()).backward()
    assert_same(gradients(model), gradients(expected()))


def fsdp2_offloaded(mesh: DeviceMesh) -> None:
    ring = ring_of(mesh)
    model = sharded(decoder(ring), mesh["dp", "cp"]._flatten("dp_cp"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    (local_loss(model, ring, mesh.get_local_rank("dp"), mesh["dp"].size()) * mesh.size()).backward()
    assert all(parameter.grad.device.type == "cpu" for parameter in model.parameters())
    assert_same(gradients(model), gradients(expected()))


def tensor_parallel(mesh: DeviceMesh, shard: bool) -> None:
    """Heads over tp, the sequence over cp; parameters also sharded over cp by FSDP2, which sums over cp, or summed here."""
    ring = ring_of(mesh)
    model = decoder(ring)
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], {**plan, "up": ColwiseParallel(), "down": RowwiseParallel()})
    if shard:
        sharded(model, mesh["cp"])
    local_loss(model, ring).mul(mesh["cp"].size() if shard else 1).backward()
    if not shard:
        sync_gradients(model, ring=ring)
    assert_same(gradients(model), gradients(expected()))


def stage_of(ring: Ring, stage: int) -> Decoder:
    """The first or second half of the decoder."""
    model = decoder(ring)
    del model.blocks[str(1 - stage)]
    if stage == 0:
        model.head = None
    else:
        model.tokens = model.places = None
    return model


def pipeline(mesh: DeviceMesh, schedule: type[PipelineScheduleSingle]) -> None:
    """Two stages, each over a ring of two; four microbatches of one row. The losses of the microbatches are summed."""
    ring, stage = ring_of(mesh), mesh.get_local_rank("pp")
    model, batch = stage_of(ring, stage), rows(ring)
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    steps = schedule(part, n_microbatches=4, loss_fn=partial(cross_entropy, num_items=number_of_labels()), scale_grads=False)
    if stage == 0:
        steps.step(batch.input_ids)
    else:
        steps.step(target=batch.labels)
    sync_gradients(model, ring=ring)
    assert_same(gradients(model), gradients(expected()), {name for name, _ in model.named_parameters()})


def other_collectives(mesh: DeviceMesh) -> None:
    """Rings over both dims in turn, and collectives of other groups that ranks start at different places between ring calls."""
    rings = [Ring(mesh, mesh_dim=dim, layout=LAYOUT) for dim in ("cp", "dp")]
    models = [decoder(ring) for ring in rings]
    counted, pending = torch.ones(1), []
    losses = []
    for call, (model, ring) in enumerate(zip(models, rings, strict=True)):
        if call == dist.get_rank() % 2:
            pending.append(dist.all_reduce(counted, async_op=True))
        losses.append(local_loss(model, ring))
    pending[0].wait()
    assert counted.item() == mesh.size()
    for model, ring, loss in reversed(list(zip(models, rings, losses, strict=True))):
        loss.backward()
        sync_gradients(model, ring=ring)
        assert_same(gradients(model), gradients(expected()))


def save(folder: str) -> None:
    """One step of Adam at cp=4."""
    mesh = mesh_of(cp=4)
    model, optimizer = trained(mesh)
    step(model, optimizer, mesh)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    oracle, steps = one_process()
    steps()
    assert_same(parameters(model), parameters(oracle))


# Two ranks.


def load(folder: str) -> None:
    """The second step at cp=2, from the checkpoint of cp=4."""
    mesh = mesh_of(cp=2)
    model, optimizer = trained(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    step(model, optimizer, mesh)
    oracle, steps = one_process()
    steps()
    steps()
    assert_same(parameters(model), parameters(oracle))


def trained(mesh: DeviceMesh) -> tuple[Decoder, torch.optim.Optimizer]:
    model = sharded(decoder(ring_of(mesh)), mesh)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def step(model: Decoder, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    optimizer.zero_grad()
    (local_loss(model, ring_of(mesh)) * mesh.size()).backward()
    optimizer.step()


def one_process() -> tuple[Decoder, Callable[[], None]]:
    model = decoder(None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)

    def steps() -> None:
        whole_step(model)
        optimizer.step()

    return model, steps


def policy(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    kept = operator == torch.ops.ring_attn.forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(mesh: DeviceMesh, forwards: int, **options: object) -> None:
    """``forwards``: how often the ring computes the forward of the two layers."""
    ring = ring_of(mesh)
    model = decoder(ring)
    for block in model.blocks.values():
        block.forward = partial(checkpoint, block.forward, **options)
    before = ring_forwards(ring)
    local_loss(model, ring).backward()
    assert ring_forwards(ring) - before == forwards, ring_forwards(ring) - before
    sync_gradients(model, ring=ring)
    assert_same(gradients(model), gradients(expected()))


def ring_forwards(ring: Ring) -> int:
    return peers.state.calls[tuple(dist.get_process_group_ranks(ring.group))].steps["forward"]


def saved_elsewhere(mesh: DeviceMesh) -> None:
    """Saved tensors that leave the device, here for bytes, and torch's own hook."""
    ring, taken = ring_of(mesh), []

    def pack(tensor: Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
        taken.append(tensor.shape)
        return tensor.numpy().tobytes(), tensor.dtype, tensor.shape

    def unpack(packed: tuple[bytes, torch.dtype, torch.Size]) -> Tensor:
        data, dtype, shape = packed
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)

    for hooks in (saved_tensors_hooks(pack, unpack), save_on_cpu()):
        model = decoder(ring)
        with hooks:
            loss = local_loss(model, ring)
        loss.backward()
        sync_gradients(model, ring=ring)
        assert_same(gradients(model), gradients(expected()))
    assert len(taken) > 20


def scaled(mesh: DeviceMesh) -> None:
    """GradScaler: gradients are summed before they are unscaled, so that all ranks see one rank's overflow."""
    ring = ring_of(mesh)
    for sharding in (False, True):
        model = sharded(decoder(ring), mesh) if sharding else decoder(ring)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), GradScaler("cpu", init_scale=256.0)
        for overflow in (False, True):
            before = parameters(model)
            optimizer.zero_grad()
            scaler.scale(local_loss(model, ring) * (mesh.size() if sharding else 1)).backward()
            if overflow and dist.get_rank() == 1:
                local = model.head.weight.grad
                getattr(local, "_local_tensor", local).view(-1)[0] = torch.inf
            if not sharding:
                sync_gradients(model, ring=ring)
            scaler.unscale_(optimizer)
            if not overflow:
                assert_same(gradients(model), gradients(expected()))
            scaler.step(optimizer)
            scaler.update()
            after = parameters(model)
            assert all(torch.equal(before[name], after[name]) == overflow for name in before)
        assert scaler.get_scale() == 128.0


def four(folder: str) -> dict[str, Callable[[], None]]:
    both, heads, stages = mesh_of(dp=2, cp=2), mesh_of(cp=2, tp=2), mesh_of(pp=2, cp=2)
    return {
        "pipeline": partial(pipeline, stages, Schedule1F1B),
        "pipeline GPipe": partial(pipeline, stages, ScheduleGPipe),
        "DDP": partial(ddp, both),
        "FSDP2": partial(fsdp2, both),
        "HSDP": partial(hsdp, both),
        "FSDP2 with CPU offload": partial(fsdp2_offloaded, both),
        "TP": partial(tensor_parallel, heads, False),
        "TP and FSDP2": partial(tensor_parallel, heads, True),
        "other collectives": partial(other_collectives, both),
        "save": partial(save, folder),
    }


def two(folder: str) -> dict[str, Callable[[], None]]:
    mesh = mesh_of(cp=2)
    selected = partial(create_selective_checkpoint_contexts, policy)
    return {
        "reentrant checkpoint": partial(checkpointed, mesh, 4, use_reentrant=True),
        "checkpoint": partial(checkpointed, mesh, 4, use_reentrant=False),
        "selective checkpoint": partial(checkpointed, mesh, 2, use_reentrant=False, context_fn=selected),
        "saved tensors elsewhere": partial(saved_elsewhere, mesh),
        "GradScaler": partial(scaled, mesh),
        "load": partial(load, folder),
    }


def main() -> None:
    dist.init_process_group("gloo")
    ring_attn.start()  # a pipeline's later stage makes its first ring call after the earlier one's
    cases = {4: four, 2: two}[dist.get_world_size()](sys.argv[1])
    Path(sys.argv[1]).mkdir(exist_ok=True)
    for name, case in cases.items():
        case()
        if dist.get_rank() == 0:
            print("ok", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
