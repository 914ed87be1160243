"""Run by torchrun for tests/ring_attn/test_generation.py: generation over all processes.

``short``: every step of some sequences against the oracle; on two ranks what they must agree on; then some text. ``long``: greedy
and drawn tokens after a prompt of 32k. Rank 0 prints the tokens.
"""

import sys

import torch
import torch.distributed as dist
from generation_cases import SEQUENCES, SmallModel, check, prompts
from torch.distributed.device_mesh import init_device_mesh

from jax_core.masks.plan import Plan
from ring_attn import Ring
from ring_attn.generation import KVCache, Sampler, decode, generate

LENGTHS = torch.tensor([37, 5, 20])
LONG = 2**15


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def short() -> None:
    ring = on_four() if dist.get_world_size() == 4 else on_two()
    found = generate(SmallModel(), prompts(), KVCache(ring, max_length=80), 13, lengths=LENGTHS)
    say(f"text {found.tolist()}")


def on_two() -> Ring:
    ring, pieces = Ring(layout="zigzag"), Plan(2, ((0, 3, 4, 7, 8, 11), (1, 2, 5, 6, 9, 10)))
    for name, other in (("window, lengths", ring), ("sinks, soft cap, lengths", Ring(layout=pieces))):
        cache = check(SEQUENCES[name], other)
        say(f"ok {name}")
    check_what_ranks_share(cache)
    return ring


def on_four() -> Ring:
    ring = Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), mesh_dim=("outer", "inner"))
    check(SEQUENCES["no prompt"], ring)
    say("ok no prompt")
    return ring


def check_what_ranks_share(cache: KVCache) -> None:
    rank = dist.get_rank()
    new = torch.full((3, 3, 2, 4, 8), float(1 + rank), dtype=torch.float64)
    cache.grow(cache.max_length + 2)
    refused("the queries must be the same on all ranks", lambda: cache.attend(0, new[0], *new[1:, :, :, :2]))
    refused("every rank of the ring must make the same call", lambda: cache.fork(torch.tensor([rank])))


def refused(words: str, call) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
        say(f"ok {words}")
    else:
        raise AssertionError(f"not refused: {words}")


def long() -> None:
    ring, model = Ring(layout="zigzag"), SmallModel(window=256, vocabulary=256, positions=LONG + 64, dtype=torch.float32)
    tokens, cache = prompts(1, LONG, 256), KVCache(ring, max_length=LONG + 64)
    generate(model, tokens, cache, 0)
    for sampler in (Sampler(), Sampler(temperature=0.8, top_p=0.95, seed=5)):
        found = decode(model, tokens[:, -1], cache.fork(torch.tensor([0])), 24, sampler=sampler)
        say(f"text {found.tolist()}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"short": short, "long": long}[sys.argv[1]]()
    dist.destroy_process_group()
