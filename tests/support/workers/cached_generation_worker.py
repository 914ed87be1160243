"""Run by torchrun for tests/integrations/test_generate.py: transformers' ``generate`` with a cache over all processes.

    torchrun --standalone --nproc-per-node 2 tests/support/workers/cached_generation_worker.py cuda

runs all families of decoders on GPUs (tests/gpu/test_models.py). Names of families, without "cuda": those on CPUs.
"""

import os
import sys
from typing import Any

import tiny_transformers as tiny
import torch
import torch.distributed as dist
import transformers
from cached_generation import SETTINGS, compare, generated, model_of, prompt

from ring_attn.integrations.transformers import context_parallel

GREEDY: dict[str, Any] = {}
BEAMS = dict(num_beams=3)
SAMPLED = dict(do_sample=True, temperature=0.9, top_k=20)


def check_what_ranks_share() -> None:
    """Ranks whose random numbers differ draw what rank 0 would, and go on from their own; other prompts are refused on all."""
    model, rank = model_of("llama"), dist.get_rank()
    cp = context_parallel(model)
    tokens, _ = generated(model, seed=rank, past_key_values=cp.cache(64), **SAMPLED)
    mine = torch.rand(())
    both = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tokens)
    assert all(torch.equal(tokens, other) for other in both)
    expected, _ = generated(model, seed=0, past_key_values=cp.cache(64), **SAMPLED)
    assert torch.equal(tokens, expected)
    if rank:
        torch.manual_seed(rank)
        assert torch.equal(mine, torch.rand(()))
    other = {**prompt(), "input_ids": prompt()["input_ids"] + rank}
    try:
        model.generate(**other, **SETTINGS, past_key_values=cp.cache(64))
    except ValueError as error:
        assert "the same whole prompts" in str(error), error
    else:
        raise AssertionError("two prompts on one ring")
    cp.remove()


def on_gpus() -> None:
    """All families, and says which gave the tokens of one GPU with transformers' own cache."""
    torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = []
    for name in sorted(tiny.CAUSAL):
        try:
            compare(name, None, GREEDY, BEAMS, device="cuda")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, wrong
    print(f"{len(tiny.CAUSAL)} families of transformers {transformers.__version__}", flush=True)


def on_cpus(*names: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        compare(name, None, *((GREEDY, BEAMS, SAMPLED) if name == "llama" else (GREEDY,)))
    if "llama" in names:
        check_what_ranks_share()


def main(*names: str) -> None:
    on_gpus() if names == ("cuda",) else on_cpus(*names)
    print("all right", flush=True)
    dist.destroy_process_group()


main(*sys.argv[1:])
