"""Run by torchrun: compares ring_attn.ring_attention over all processes with attention over the whole sequence on each of them.

Every process makes the same whole tensors from a seed, shards them, and compares its shard of the output, the LSE and every
gradient. Gradients of operands that ranks share are summed over the ring first. Prints "ok <case> <layout>" for each on rank 0.

Arguments: "cpu" or "cuda"; how many rings (rows of a 2-D mesh, each with its own shard length); the dtype of the
shards (the whole sequence is always float64); the cases, all if none is given.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from jax_core.masks.layout import shard_indices
from torch_bridge.start.runtime import start

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def even_heads_look_back(batch, head, q_pos, k_pos):
    return (head % 2 == 1) | (k_pos <= q_pos)


def whole_inputs(length: int, cross: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = length * (2 if cross else 1)
    return {
        "q": normal(BATCH, length, HEADS, DIM),
        "k": normal(BATCH, keys, KV_HEADS, DIM),
        "v": normal(BATCH, keys, KV_HEADS, DIM + 4),
        "bias": normal(BATCH, 1, length, keys),
        "mask": torch.rand(1, HEADS, length, keys, generator=generator) > 0.2,
        "sinks": normal(HEADS),
        "alibi_slopes": normal(HEADS).abs(),
        "q_segment_ids": torch.sort(torch.randint(-1, 3, (BATCH, length), generator=generator))[0],
        "q_position_ids": torch.randint(0, length, (BATCH, length), generator=generator),
    }


ALWAYS = ("q", "k", "v")
CASES: dict[str, dict] = {
    "causal": dict(causal=True, qkv_format="bhsd"),
    "cross": dict(softcap=2.0),
    "window, sinks, bias": dict(sliding_window=(20, 5), arrays=("sinks", "bias")),
    "chunk, segments, slopes": dict(chunk_size=13, arrays=("q_segment_ids", "alibi_slopes")),
    "mask, dropout": dict(dropout_p=0.3, dropout_seed=-7, arrays=("mask",)),
    "head groups": dict(causal=True, head_groups=2, arrays=("sinks", "bias", "mask", "alibi_slopes", "q_segment_ids")),
    "positions, mask_mod": dict(causal=True, mask_mod=even_heads_look_back, arrays=("q_position_ids",)),
}
SEQUENCE_DIM = {"bias": 2, "mask": 2}
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


def results(tensors: dict, options: dict, weights) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    tensors = {name: x.clone().requires_grad_(name in DIFFERENTIABLE) for name, x in tensors.items()}
    swap = options.get("qkv_format") == "bhsd"
    given = {name: x.transpose(1, 2) if swap and name in ALWAYS else x for name, x in tensors.items()}
    out, lse = ring_attn.ring_attention(**given, **options, return_lse=True)
    out = out.transpose(1, 2) if swap else out
    ((out * weights[0]).sum() + (lse.clamp_min(-1e9) * weights[1]).sum()).backward()
    return out, lse, {name: x.grad for name, x in tensors.items() if x.grad is not None}


def check(case: str, ring: ring_attn.Ring, shard: int, dtype: torch.dtype) -> None:
    size, rank, layout, device = ring.size, ring.rank, ring.layout, ring.mesh.device_type
    options = dict(CASES[case])
    whole = whole_inputs(size * shard, cross=case == "cross")
    whole = {name: whole[name].to(device) for name in (*ALWAYS, *options.pop("arrays", ()))}
    length = whole["q"].shape[1]
    shapes = (BATCH, length, HEADS, DIM + 4), (BATCH, HEADS, length)
    weights = [torch.randn(shape, dtype=torch.float64).to(device) for shape in shapes]
    out, lse, gradients = results(whole, options | {"mesh": "local"}, weights)

    def held(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.index_select(dim, torch.tensor(shard_indices(layout, rank, size, x.shape[dim]), device=x.device))

    shared = ("sinks", "alibi_slopes")
    shards = {name: x if name in shared else held(x, SEQUENCE_DIM.get(name, 1)) for name, x in whole.items()}
    shards = {name: x.to(dtype) if x.is_floating_point() else x for name, x in shards.items()}
    here = results(shards, options | ring.arguments(), (held(weights[0], 1).to(dtype), held(weights[1], 2)))
    bound = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 5e-5}
    torch.testing.assert_close(here[0].double(), held(out, 1), **bound)
    torch.testing.assert_close(here[1].double(), held(lse, 2), **bound)
    assert here[2].keys() == gradients.keys()
    for name, gradient in here[2].items():
        if name in shared:
            dist.all_reduce(gradient, group=ring.group)
        expected = gradients[name] if name in shared else held(gradients[name], SEQUENCE_DIM.get(name, 1))
        torch.testing.assert_close(gradient.double(), expected, **bound, msg=lambda text, name=name: f"{name}: {text}")


def main(device: str, rings: str, dtype: str = "float64", *cases: str) -> None:
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start()  # before the whole sequence's attention, which needs no other process and would start JAX as a single one
    torch.manual_seed(2)
    mesh = init_device_mesh(device, (int(rings), dist.get_world_size() // int(rings)), mesh_dim_names=("dp", "cp"))
    layouts = ("contiguous", "zigzag", "striped")
    for i, case in enumerate(CASES):
        if cases and case not in cases:
            continue
        for layout in layouts if case == "causal" else layouts[i % 3 :][:1]:
            ring = ring_attn.Ring(mesh, mesh_dim="cp", layout=layout)
            check(case, ring, 18 + 4 * mesh.get_local_rank("dp"), getattr(torch, dtype))
            if dist.get_rank() == 0:
                print("ok", case, layout, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
