"""Prints, as JSON, what became of JAX's cache on disk in this process: `attention` makes a call and its gradients, `sine` runs a
small program of JAX's own, `sums` two that differ in a number."""

import json
import sys
import warnings
from collections import Counter
from typing import Any

import jax
import torch
from jax._src import compilation_cache  # which cache it is, no public function tells

events: Counter[str] = Counter()
settings: Any = jax.config


def count(event: str, **_: str | int) -> None:
    events[event.rsplit("/", 1)[-1]] += 1


jax.monitoring.register_event_listener(count)


def attention() -> list[float]:
    import ring_attn

    q, k, v = (torch.linspace(start, 1, 96).reshape(1, 6, 2, 8).requires_grad_() for start in (-1, 0, 0.5))
    out = ring_attn.ring_attention(q, k, v, causal=True)
    return [x.double().sum().item() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))]


def sine() -> list[float]:
    from torch_bridge.start.compilation_cache import keep_programs

    keep_programs()
    return [float(jax.jit(lambda x: jax.numpy.sin(x).sum())(jax.numpy.arange(8.0)))]


def plus_one(x: jax.Array) -> jax.Array:
    return x + 1


def plus_twelve(x: jax.Array) -> jax.Array:
    return x + 12


def sums() -> list[float]:
    from torch_bridge.start.compilation_cache import keep_programs

    keep_programs()
    return [float(jax.jit(function)(jax.numpy.float32(0))) for function in (plus_one, plus_twelve)]


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = {"attention": attention, "sine": sine, "sums": sums}[sys.argv[1]]()

print(
    json.dumps(
        {
            "results": results,
            "compiled": events["cache_misses"],
            "found": events["cache_hits"],
            "folder": settings.jax_compilation_cache_dir,
            "least": settings.jax_persistent_cache_min_compile_time_secs,
            "cache": type(compilation_cache._cache).__name__,
            "warnings": [str(warning.message) for warning in caught],
        }
    )
)
