"""A transformers model under FSDP2 and activation checkpointing on a ring, with each lever of ``context_parallel`` and all of them:
loss and gradients of one process, and what is counted in a step."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from ring_attn.integrations.transformers import context_parallel
from ring_attn.memory import Levers, Setting, Shapes, peak
from ring_attn.training import checkpoint
from torch_bridge.backends import compiled
from torch_bridge.call.checkpointed_calls import CheckpointedCalls

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, TOKENS = 3, 4, 2, 8, 32, 64
CASES: dict[str, tuple[dict[str, Any], bool]] = {  # and whether nothing is reordered
    "head_groups": ({"head_groups": 2}, True),
    "offload": ({"checkpoint": "offload"}, True),
    "offload_inputs": ({"offload_inputs": True}, True),
    "again": ({"checkpoint": None}, True),
    "loss_chunk": ({"loss_chunk": 3}, False),
    "mlp_tile": ({"mlp_tile": 5}, False),
    "all": ({"loss_chunk": 3, "mlp_tile": 5, "head_groups": 2, "checkpoint": "offload", "offload_inputs": True}, False),
}


def made() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=DIM)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attn_implementation="eager")
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


class Counted(TorchDispatchMode):
    """Ring passes, collectives of FSDP2, bytes kept of attention, and the inputs of layers that were moved."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.moved: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["gathered"] += func.namespace == "c10d" and "allgather" in func.name()
        self.found["scattered"] += func.namespace == "c10d" and "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Counted":
        self._before = compiled.CompiledProgram._run, CheckpointedCalls.save, checkpoint._moves, checkpoint.HostCopy
        run, keep, _, _ = self._before
        found, moved = self.found, self.moved

        def counting(program: Any, step: str, *given: Any) -> Any:
            found[step] += 1
            return run(program, step, *given)

        def weighing(calls: Any, key: str, operands: Any, results: Any) -> None:
            found["kept"] += sum(x.numel() * x.element_size() for x in results)
            keep(calls, key, operands, results)

        class OnHost:
            """In the place of a copy in pinned memory, which only a GPU has."""

            def __init__(self, tensor: Tensor) -> None:
                found["moved"] += tensor.numel() * tensor.element_size()
                moved.append(StorageWeakRef(tensor.untyped_storage()))
                self.tensor = tensor.clone()

            def fetch(self) -> None:
                found["fetched"] += 1

            def on_device(self) -> Tensor:
                return self.tensor.clone()

        compiled.CompiledProgram._run, CheckpointedCalls.save = counting, weighing
        checkpoint._moves, checkpoint.HostCopy = lambda _: True, OnHost
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        compiled.CompiledProgram._run, CheckpointedCalls.save, checkpoint._moves, checkpoint.HostCopy = self._before


def stepped(mesh: DeviceMesh, batch: dict[str, Tensor], levers: dict[str, Any]) -> tuple[list[Tensor], Counter[str]]:
    model = made()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    cp = context_parallel(model, mesh, **levers)
    shard = cp.shard(batch)
    if "mlp_tile" in levers or "loss_chunk" in levers:
        model(**shard).loss.backward()  # with what is tried once
        model.zero_grad()
    with Counted() as counted:
        loss = model(**shard).loss
        counted.found["held"] = sum(not memory.expired() for memory in counted.moved)
        (loss * mesh.size()).backward()
    return [loss.detach(), *(x.grad.full_tensor() for x in model.parameters())], counted.found


def check_counts(found: Counter[str], usual: Counter[str], levers: Levers, tokens: int) -> None:
    groups, again = levers.head_groups, levers.checkpoint is None
    assert found["forward"] == LAYERS * groups * (1 + again) and found["backward"] == LAYERS * groups, found
    assert (found["gathered"], found["scattered"]) == (usual["gathered"], usual["scattered"]), (found, usual)
    # The formula is of 16 bits: the numbers here are twice as wide, but for the LSE.
    shapes = Shapes(LAYERS, HIDDEN, 48, HEADS, KV_HEADS, DIM, 64)
    kept = 0 if again else 2 * tokens * LAYERS * 2 * HEADS * DIM + tokens * LAYERS * 4 * HEADS
    assert found["kept"] == kept, (found, kept)
    moved = peak(shapes, Setting(1, levers=Levers(None, offload_inputs=levers.offload_inputs)), tokens).host
    assert not found["held"], found  # memory of what has moved
    assert found["moved"] == 2 * moved and found["fetched"] == (LAYERS - 1) * levers.offload_inputs, (found, moved)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    whole: nn.Module = made()
    loss = whole(**batch).loss
    loss.backward()
    expected = [loss.detach(), *(x.grad for x in whole.parameters())]
    usual, counts = stepped(mesh, batch, {})
    torch.testing.assert_close(usual, expected, rtol=1e-4, atol=1e-6)
    for name, (levers, same) in CASES.items():
        found, counted = stepped(mesh, batch, levers)
        check_counts(counted, counts, Levers(**levers), TOKENS // mesh.size())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        if same:
            assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True)), name
        print(f"{name}: right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
