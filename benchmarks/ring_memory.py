"""Peak memory of a call on one GPU, torch's and JAX's part, beside what the call must hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from report import Report
from ring_systems import Shards

GIB = 2**30


@dataclass
class Memory:
    """Bytes. torch's peak is that of the call, JAX's that of the process so far; `card`: taken on the card, by any program."""

    torch_peak: int = 0
    jax_peak: int = 0
    card: int = 0


@contextmanager
def watch_memory(device: torch.device) -> Iterator[Memory]:
    memory = Memory()
    if device.type != "cuda":
        yield memory
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield memory
    torch.cuda.synchronize(device)
    memory.torch_peak = torch.cuda.max_memory_allocated(device)
    memory.jax_peak = jax_peak()
    free, total = torch.cuda.mem_get_info(device)
    memory.card = total - free


def jax_peak() -> int:
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0))


def must_hold(shards: Shards) -> int:
    """q, k, v, out, dout, dq, dk, dv and the LSE of this rank."""
    operands = shards.query, shards.key, shards.value
    gradients = sum(x.nbytes for x in operands)
    lse = 4 * shards.query.shape[1] * shards.query.shape[2]
    return gradients + sum(x.nbytes for x in operands) + 2 * shards.dout.nbytes + lse


def add_memory(report: Report, case: str, memory: Memory, shards: Shards) -> None:
    """Both peaks together are an upper bound: they need not fall at the same moment."""
    held, peak = must_hold(shards), memory.torch_peak + memory.jax_peak
    figures = {"held": held, "torch": memory.torch_peak, "jax": memory.jax_peak, "card": memory.card}
    per_token = peak / shards.query.shape[1] / 1024
    report.add(
        case=case,
        system="auto",
        phase="memory",
        **{f"{name} GiB": size / GIB for name, size in figures.items()},
        **{"peak / held": peak / held, "KiB a token": per_token},
    )
