"""Pretrains a byte-level language model with FSDP2 over data parallelism x context parallelism.

    torchrun --standalone --nproc-per-node 4 examples/pretrain_fsdp2.py --cp 2
    torchrun --standalone --nproc-per-node 8 examples/pretrain_fsdp2.py --cp 8 --context 131072 --width 1024 --layers 16 --heads 8

Runs on GPUs if there are any (NCCL, parameters gathered in bfloat16), and else on CPU (gloo). Every ``--cp`` processes share one
sequence; the others have other sequences. Parameters, gradients and optimizer state are sharded over all processes.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ring_attn
from language_model import LanguageModel, standard_library_text, window


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    """The processes as dp x cp: neighbours share a sequence."""
    if "RANK" not in os.environ:
        sys.exit("torchrun starts the processes: torchrun --standalone --nproc-per-node 4 examples/pretrain_fsdp2.py --cp 2")
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    if dist.get_world_size() % options.cp:
        sys.exit(f"--cp {options.cp} does not divide the {dist.get_world_size()} processes")
    shape = (dist.get_world_size() // options.cp, options.cp)
    return init_device_mesh("cuda" if gpu else "cpu", shape, mesh_dim_names=("dp", "cp"))


def make_model(options: argparse.Namespace, mesh: DeviceMesh, ring: ring_attn.Ring) -> LanguageModel:
    """Sharded by FSDP2 over dp x cp, block by block, so that one block's parameters at a time are whole."""

    def attention() -> nn.Module:
        return ring_attn.RingAttention(options.width, options.heads, bias=False, batch_first=True, causal=True, ring=ring)

    torch.manual_seed(0)  # all processes make the same parameters, and keep their shards
    with torch.device(mesh.device_type):
        model = LanguageModel(options.width, options.layers, options.context + 2 * options.cp, attention)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mesh.device_type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        if options.checkpoint_activations:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    return model


def train(options: argparse.Namespace) -> None:
    mesh = make_mesh(options)
    ring = ring_attn.Ring(mesh, mesh_dim="cp", layout=options.layout)
    model = make_model(options, mesh, ring)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    text = standard_library_text(least=options.context)
    dp, dp_rank = mesh["dp"].size(), mesh.get_local_rank("dp")
    tokens_per_second = meter(options.context * dp, mesh)
    for step in range(options.steps):
        batch = ring.shard_batch(window(text, step * dp + dp_rank, options.context).to(mesh.device_type))
        labels = batch.num_labels.clone()  # of this ring; the loss is the mean over all of them
        dist.all_reduce(labels, group=mesh.get_group("dp"))
        logits = model(batch.input_ids, batch.position_ids)
        loss = ring_attn.cross_entropy(logits, batch, num_items=labels)  # this process's part
        (loss * mesh.size()).backward()  # FSDP2 takes the mean of the gradients over all processes; their sum is the gradient
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {total.item():.4f}, {tokens_per_second():.0f} tokens/s", flush=True)
    dist.destroy_process_group()


def meter(tokens: int, mesh: DeviceMesh) -> Callable[[], float]:
    """Returns a function that gives the tokens per second since it was last called. The first step compiles."""
    started = time.perf_counter()

    def tokens_per_second() -> float:
        nonlocal started
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        rate, started = tokens / (now - started), now
        return rate

    return tokens_per_second


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="processes that share a sequence (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="bytes in a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--checkpoint-activations", action="store_true", help="compute activations again in the backward")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_options())
