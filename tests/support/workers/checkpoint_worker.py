"""One rank of the test of checkpoints that keep attention. Run by test_checkpoint.py under torchrun, on rings of two and four.

Layers in a zigzag ring, as they are and sharded by FSDP2: gradients must have the bits of full recomputation.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ring_attn import Ring, RingAttention, keep_attention, start, sync_gradients
from ring_attn.training.checkpoint import KeepingAttention
from tests.support.healthy import gloo_world
from torch_bridge.backends import compiled

LAYERS = 2
FULL = partial(checkpoint, use_reentrant=False)
KEPT = {
    "context_fn": partial(checkpoint, use_reentrant=False, context_fn=keep_attention),
    "reentrant": lambda layer, x: checkpoint(KeepingAttention(layer), x, use_reentrant=True),
}


class Layer(nn.Module):
    def __init__(self, ring):
        super().__init__()
        self.attention = RingAttention(16, 2, batch_first=True, causal=True, ring=ring)
        self.mlp = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mlp(torch.tanh(self.attention(x, x, x, need_weights=False)[0]))


def step(ring, way, shard):
    """The gradients and the number of forwards that ran."""
    torch.manual_seed(0)
    layers, whole = nn.ModuleList(Layer(ring) for _ in range(LAYERS)), torch.randn(1, 32, 16)
    if shard is not None:
        for layer in layers:
            fully_shard(layer, mesh=shard)
    forwards, run = [], compiled.CompiledProgram._run

    def noting(self, step, *arguments):
        forwards.extend([step] * (step == "forward"))
        return run(self, step, *arguments)

    compiled.CompiledProgram._run = noting
    try:
        x = ring.shard(whole).requires_grad_()
        y = x
        for layer in layers:
            y = way(layer, y)
        y.square().sum().backward()
    finally:
        compiled.CompiledProgram._run = run
    if shard is None:
        sync_gradients(layers, ring=ring)
    parts = (p.grad.to_local() if shard is not None else p.grad for p in layers.parameters())
    return [x.grad, *(part.clone() for part in parts)], len(forwards)


def main():
    with gloo_world("checkpoint") as (_, size):
        start()
        mesh = init_device_mesh("cpu", (size,))
        ring = Ring(mesh, layout="zigzag")
        for shard in (None, mesh):
            expected, forwards = step(ring, FULL, shard)
            assert forwards == 2 * LAYERS
            for name, way in KEPT.items():
                found, forwards = step(ring, way, shard)
                assert forwards == LAYERS, (name, forwards)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (name, shard is not None)


if __name__ == "__main__":
    main()
