"""One job of benchmarks/training/compare.py: a model trained by one system, row after row; a JSON line for each.

torchrun --standalone --nproc-per-node 2 -m benchmarks.training.job "ring-attn" --rows 4k 16k
"""

import argparse
import ctypes
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.streams import Event, recorded, split
from benchmarks.harness.team import GIB, ON_GPU, Team, tidy
from benchmarks.harness.timing import reason
from benchmarks.training.models import SHAPES, USUAL, VOCABULARY
from benchmarks.training.systems import SYSTEMS, Batch, Setting, Step, cudnn, predicted
from torch_bridge.start.jax_memory import default_pool, trim_jax_memory

SAID = '{"row": '
_RESERVED_HIGH, _USED_HIGH = 6, 8  # CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, CU_MEMPOOL_ATTR_USED_MEM_HIGH


KINDS = ("attention's forward", "attention's backward", "products", "elementwise", "copies", "NCCL alone", "idle")


@dataclass(frozen=True)
class Row:
    """``steps`` of one length, after ``warm`` that are not timed. ``documents``: how many, of uneven lengths, the tokens are."""

    tokens: int
    steps: int
    warm: int = 2
    documents: int = 1


ROWS = {
    "4k": Row(2**12, 8),
    "16k": Row(2**14, 5),
    "16k, 20 steps": Row(2**14, 20, warm=0),
    "lengths": Row(2**14, 12),
    "64k": Row(2**16, 3, warm=1),
    "128k": Row(2**17, 2, warm=1),
    "128k, once": Row(2**17, 1, warm=1),
    "256k": Row(2**18, 1, warm=1),
    "320k": Row(5 * 2**16, 1, warm=1),
    "384k": Row(3 * 2**17, 1, warm=1),
    "512k": Row(2**19, 1, warm=1),
    "512k, first": Row(2**19, 1, warm=0),  # which compiles
    "1M": Row(2**20, 1, warm=1),
    "768k, first": Row(3 * 2**18, 1, warm=0),
    "1M, first": Row(2**20, 1, warm=0),
    "64 documents in 256k": Row(2**18, 1, warm=1, documents=64),
    "16 documents in 64k": Row(2**16, 3, documents=16),  # the last: who cannot take it has trained for fewer steps from there on
}


def batch(generator: torch.Generator, tokens: int, device: torch.device, documents: int = 1) -> Batch:
    """Documents' lengths are those of random cuts, each a multiple of nothing."""
    values = torch.randint(VOCABULARY, (1, tokens), generator=generator).to(device)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values + 1
    starts = torch.zeros(tokens, dtype=torch.int64)
    starts[cuts] = cuts
    positions = torch.arange(tokens) - starts.cummax(0).values
    return Batch(values, positions[None].to(device))


def new_lengths(row: Row, generator: torch.Generator) -> list[int]:
    """Even, as torch's context parallelism needs them: it does not pad."""
    return (4 * torch.randint(row.tokens // 16, row.tokens // 4, (row.steps,), generator=generator)).tolist()


def measured(team: Team, step: Step, name: str, scale: int) -> dict[str, Any]:
    """Looking at the device's memory slows the host, so it has a step that is not timed; where one alone is, of so many tokens
    that the device takes all of its time, that one. Such a step is not recorded either."""
    row, generator = ROWS[name], torch.Generator().manual_seed(crc32(name.encode()))
    begin()
    make = partial(batch, generator, device=team.device, documents=row.documents)
    if name == "lengths":
        with DeviceMemory() as device:
            figures = several_lengths(team, step, row, make, scale)
        return {**figures, **memory(team, device)}
    if row.steps == 1:
        with DeviceMemory() as device:
            figures = one_length(team, step, row, make, scale)
        return {**figures, **memory(team, device)}
    figures = one_length(team, step, row, make, scale)
    with DeviceMemory() as device:
        timed(team, step, iter([make(row.tokens // scale)]))
    events = recorded(lambda: step(make(row.tokens // scale)), team.ready)
    return {**figures, **memory(team, device), **(split(events, kind, KINDS) if events else {})}


def kind(event: Event) -> str:
    """What of a step an event belongs to."""
    if event.is_rotation:
        return "NCCL alone"
    if event.is_attention:
        return "attention's backward" if event.is_backward else "attention's forward"
    return "copies" if event.is_copy else "products" if event.is_product else "elementwise"


def one_length(team: Team, step: Step, row: Row, make: Callable[[int], Batch], scale: int) -> dict[str, Any]:
    seconds, losses = timed(team, step, (make(row.tokens // scale) for _ in range(row.warm + row.steps)))
    middle = statistics.median(seconds[row.warm :])
    told = {"loss, first": losses[0], "loss, last": losses[-1], "loss, mean": statistics.fmean(losses)}
    return {"seconds": middle, "tokens/s": row.tokens / scale / middle, **told}


def several_lengths(team: Team, step: Step, row: Row, make: Callable[[int], Batch], scale: int) -> dict[str, Any]:
    lengths = [length // scale // 4 * 4 for length in new_lengths(row, torch.Generator().manual_seed(0))]
    return {what: sum(timed(team, step, map(make, lengths))[0]) for what in ("seconds, new", "seconds, again")}


def timed(team: Team, step: Step, batches: Iterator[Batch]) -> tuple[list[float], list[float]]:
    """Of each step its time on the slowest rank, and its loss."""
    seconds, losses = [], []
    for given in batches:
        team.ready()
        start = time.perf_counter()
        losses.append(step(given))
        team.ready()
        seconds.append(team.slowest(time.perf_counter() - start))
    return seconds, [float(loss) for loss in losses]


class DeviceMemory:
    """The most that was taken of the device while this is open, as NVML says it every 10 ms: pools may give back what they held
    between two steps."""

    def __enter__(self) -> "DeviceMemory":
        self.most, self._over = 0, threading.Event()
        self._device = torch.cuda.current_device() if ON_GPU else 0  # a thread's own is the first GPU
        self._thread = threading.Thread(target=self._look, daemon=True)
        if ON_GPU:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if ON_GPU:
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, torch.cuda.device_memory_used(self._device))


def memory(team: Team, device: DeviceMemory) -> dict[str, float]:
    """GiB, on the rank that has most: the peak of torch's tensors, what its allocator reserved, the same of CUDA's pool, which is
    JAX's, and the most taken of the device."""
    if not ON_GPU:
        return {}
    found = {
        "torch's peak": torch.cuda.max_memory_allocated(),
        "torch's reserved": torch.cuda.max_memory_reserved(),
        "JAX's peak": high_of_pool(_USED_HIGH),
        "JAX's reserved": high_of_pool(_RESERVED_HIGH),
        "device": device.most,
    }
    return {f"{name}, GiB": team.slowest(nbytes / GIB) for name, nbytes in found.items()}


def high_of_pool(attribute: int, reset: bool = False) -> int:
    """A high-water mark of CUDA's default pool, in bytes; ``reset`` begins a new one."""
    cuda, pool = default_pool(torch.device("cuda", torch.cuda.current_device()))
    found = ctypes.c_uint64()
    (cuda.cuMemPoolSetAttribute if reset else cuda.cuMemPoolGetAttribute)(pool, attribute, ctypes.byref(found))
    return found.value


def begin() -> None:
    """What a row before this one needed is not this one's."""
    tidy()
    if ON_GPU:
        trim_jax_memory(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.reset_peak_memory_stats()
        for attribute in (_USED_HIGH, _RESERVED_HIGH):
            high_of_pool(attribute, reset=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--expandable", action="store_true", help="torch's allocator grows its segments")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", choices=SHAPES, default=USUAL)
    parser.add_argument("--small", action="store_true", help="two small layers and a 64th of the tokens, to see that it runs")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    team = Team(timeout=300)
    if options.expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    checkpointing = not options.no_checkpointing
    setting = Setting(options.sharded, checkpointing, options.compiled, options.layers, options.small, options.model)
    mesh = init_device_mesh(team.device.type, (team.size,), mesh_dim_names=("cp",))
    with cudnn(ON_GPU):
        step = None
        for name in options.rows:
            try:
                step = step or SYSTEMS[options.system](setting, mesh)
                found = measured(team, step, name, 64 if options.small else 1)
                if ON_GPU and name != "lengths":
                    found |= predicted(options.system, setting, team.size, ROWS[name].tokens // team.size)
            except Exception as error:
                found = {"failed": reason(error)}
            team.say(json.dumps({"row": name, "found": found}))
    team.close()


if __name__ == "__main__":
    main()
