"""Run by torchrun for tests/ring_attn/test_generation.py: generation over all processes.

``start FOLDER``: every step of some sequences against the oracle; what ranks must agree on; then some text, and its cache saved.
``go on FROM TO POSITIONS TOKENS COUNT``: the cache of a ring of any size is loaded, which is to be at these positions, COUNT tokens
follow TOKENS, and it is saved again. ``long``: greedy and drawn tokens after a prompt of 32k. Rank 0 prints the tokens.
"""

import json
import sys

import torch
import torch.distributed as dist
from generation_cases import SEQUENCES, SmallModel, check, prompts
from torch.distributed.device_mesh import init_device_mesh

from jax_core.masks.plan import Plan
from ring_attn import Ring
from ring_attn.generation import KVCache, Sampler, decode, generate, load, save

LENGTHS = torch.tensor([37, 5, 20])
LONG = 2**15


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def start(folder: str) -> None:
    ring, pieces = Ring(layout="zigzag"), Plan(2, ((0, 3, 4, 7, 8, 11), (1, 2, 5, 6, 9, 10)))
    for name, other in (("window, lengths", ring), ("sinks, soft cap, lengths", Ring(layout=pieces))):
        cache = check(SEQUENCES[name], other)
        say(f"ok {name}")
    check_what_ranks_share(cache)
    cache = KVCache(ring, max_length=80)
    found = generate(SmallModel(), prompts(), cache, 13, lengths=LENGTHS)
    say(f"text {found.tolist()}")
    save(cache, folder)


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


def go_on(source: str, target: str, positions: str, tokens: str, count: str) -> None:
    ring = Ring(layout="striped")
    if dist.get_world_size() == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        ring = Ring(grid, mesh_dim=("outer", "inner"))
        check(SEQUENCES["no prompt"], ring)
        say("ok no prompt")
    cache = load(source, ring, max_length=80)
    assert cache.positions()[:, 0].tolist() == json.loads(positions)
    say(f"text {decode(SmallModel(), torch.tensor(json.loads(tokens)), cache, int(count)).tolist()}")
    save(cache, target)


def long() -> None:
    ring, model = Ring(layout="zigzag"), SmallModel(window=256, vocabulary=256, positions=LONG + 64, dtype=torch.float32)
    tokens, cache = prompts(1, LONG, 256), KVCache(ring, max_length=LONG + 64)
    generate(model, tokens, cache, 0)
    for sampler in (Sampler(), Sampler(temperature=0.8, top_p=0.95, seed=5)):
        found = decode(model, tokens[:, -1], cache.fork(torch.tensor([0])), 24, sampler=sampler)
        say(f"text {found.tolist()}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"start": start, "go on": go_on, "long": long}[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
