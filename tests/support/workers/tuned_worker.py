"""Run by torchrun on two ranks whose caches differ: whichever asks first decides, and both compute with its configuration."""

import json
import os
import sys
from pathlib import Path

import jax
import torch
import torch.distributed as dist

import ring_attn
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import xla
from jax_core.tune import lookup, search, store
from jax_core.tune.devices import device_name
from jax_core.tune.search import Result
from jax_core.tune.table import Tuned

FOLDER = Path(sys.argv[1])
KEY = "xla float32 dim 8 group 1 causal up to 4096"
OWN = {0: (16, 32), 1: (32, 16)}  # blocks in the cache, or the result of a search, of each rank


def found(kind: type[FwdParams], blocks: tuple[int, int]) -> Tuned:
    return Tuned(kind(*blocks), 1.0, 2.0, True, "2026-11-22", {})


def compute(causal: bool, **settings) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (ring_attn.shard(torch.randn(1, 128, 2, 8)) for _ in range(3))
    q.requires_grad_()
    out = ring_attn.ring_attention(q, k, v, causal=causal, **settings)
    out.sum().backward()
    return out.detach()


def told(rank: int, name: str) -> None:
    """Which blocks this rank's kernel was called with, for the test to compare."""
    (FOLDER / f"{name} {rank}").write_text(json.dumps(sorted(called)))
    called.clear()


dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["RING_ATTN_CACHE"] = str(FOLDER / f"cache of {rank}")
store.merge(
    lookup.user_file(device_name("cpu")) or Path(),
    device_name("cpu"),
    {KEY: {"forward": found(FwdParams, OWN[rank]), "backward": found(BwdParams, OWN[rank])}},
)
called: set[tuple[int, int]] = set()


def noting(function):
    def noted(pair, before, third, config):
        called.add((config.params.q_blocksize, config.params.kv_blocksize))
        return function(pair, before, third, config)

    return noted


xla.forward, xla.backward = noting(xla.forward), noting(xla.backward)
compute(causal=True)
told(rank, "cached")


def search_differently(kernel, problem):
    assert not (FOLDER / "searched").exists(), "two ranks search"
    (FOLDER / "searched").write_text(str(rank))
    return {way: Result(found(kind, OWN[rank]), FwdParams(), 2, 2, ()) for way, kind in lookup.PASSES.items()}


search.search = search_differently  # type: ignore[assignment]
compute(causal=False, cfg=ring_attn.RingAttentionConfig(autotune=True))
told(rank, "autotuned")
assert jax.process_count() == 2
dist.destroy_process_group()
