"""A transformers Llama of 1B parameters (random), trained on one long sequence with FSDP2, on this library's ring and with torch's
context parallelism: seconds a step, tokens per second, peak memory, loss.

    torchrun --standalone --nproc-per-node 4 benchmarks/llama.py [--tokens 131072] [--steps 50] [--small]

Both train the same weights on the same tokens, one after the other in one run, with activation checkpointing. torch's has K/V
repeated to as many heads as the queries have, as it needs. ``--small`` is a model of two layers, to see that it runs.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from ring_attn.integrations.transformers import context_parallel
from team import GIB, ON_GPU, Team, hardware, software, tidy
from torch_bridge import runtime

VOCABULARY = 32768
Step = Callable[[], torch.Tensor]  # forward and backward; the loss over all tokens


def model_of(options: argparse.Namespace, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Sharded by FSDP2, block by block, in bfloat16 with float32 weights."""
    sizes = (64, 128, 2, 4, 2) if options.small else (2048, 8192, 16, 32, 8)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **dict(zip(names, sizes, strict=True)),
        vocab_size=VOCABULARY,
        max_position_embeddings=options.tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(mesh.device_type)
    model.gradient_checkpointing_enable()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


@contextlib.contextmanager
def on_ring(model: LlamaForCausalLM, tokens: torch.Tensor, mesh: DeviceMesh) -> Any:
    cp = context_parallel(model, mesh)
    batch = cp.shard({"input_ids": tokens, "labels": tokens})

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        (loss * mesh.size()).backward()  # FSDP takes the mean over the ranks
        return loss.detach()

    yield step
    cp.remove()


@contextlib.contextmanager
def in_torch(model: LlamaForCausalLM, tokens: torch.Tensor, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor.experimental import context_parallel as enter
    from transformers.integrations import sdpa_attention
    from transformers.models.llama import modeling_llama

    sdpa_attention.use_gqa_in_sdpa = lambda *_: False  # it takes as many K/V heads as query heads
    modeling_llama.create_causal_mask = lambda **_: None  # causal; positions that jump would be taken for packed documents
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    buffers = [tokens.clone(), labels, positions]

    def step() -> torch.Tensor:
        logits = model(input_ids=buffers[0], position_ids=buffers[2], use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), buffers[1].flatten(), reduction="sum")
        loss = total / (tokens.shape[1] - 1)
        (loss * mesh.size()).backward()
        torch.distributed.all_reduce(loss := loss.detach())
        return loss

    with enter(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        yield step


SYSTEMS = {"ring-attn": on_ring, "torch context_parallel": in_torch}


def train(team: Team, name: str, options: argparse.Namespace, mesh: DeviceMesh) -> None:
    tidy()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    model = model_of(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU)
    tokens = torch.randint(VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(1)).to(team.device)
    backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if ON_GPU else contextlib.nullcontext()
    with SYSTEMS[name](model, tokens, mesh) as step, backend:
        seconds, losses = [], []
        for _ in range(options.steps):
            team.ready()
            start = time.perf_counter()
            losses.append(step())
            optimizer.step()
            optimizer.zero_grad()
            team.ready()
            seconds.append(time.perf_counter() - start)
    median = team.slowest(statistics.median(seconds[min(3, options.steps - 1) :]))  # the first compile
    shown = ", ".join(f"{float(losses[at]):.4f}" for at in sorted({0, 1, options.steps // 2, options.steps - 1}))
    team.say(
        f"{name}: {median:.3f} s a step, {options.tokens / median:,.0f} tokens/s, {memory()}; losses {shown} "
        f"(first, second, middle, last of {options.steps})"
    )


def memory() -> str:
    """Peaks of torch's and JAX's allocators; they need not occur at one moment. JAX's is that of the process so far."""
    if not ON_GPU:
        return "memory not measured on a CPU"
    import jax

    of_jax = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return f"peak memory of torch {torch.cuda.max_memory_allocated() / GIB:.1f} GiB, of JAX {of_jax / GIB:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()

    team = Team(timeout=300)
    mesh = init_device_mesh(team.device.type, (team.size,), mesh_dim_names=("cp",))
    runtime.start(device=team.device)
    team.say(f"{team.size} x {hardware()}; {software()}; {options.tokens} tokens, FSDP2 over the ranks of the ring")
    for name in options.systems:
        try:
            train(team, name, options, mesh)
        except Exception as error:
            team.say(f"{name} failed: {str(error)[-600:]}")
    team.close()


if __name__ == "__main__":
    main()
