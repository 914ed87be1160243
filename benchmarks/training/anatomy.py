"""What is in a GPU's memory during a step of training, by what made it: torch's own history of allocations. At the peak in one line
for each place in the code; over the step in few parts, which benchmarks/training/levers_picture.py draws.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.training.anatomy "ring-attn, and inputs" --tokens 131072 --model Qwen3-8B

The first step is not looked at: it compiles, and makes the optimizer's state. What was there before the second begins is one line,
"before". JAX's own buffers are not torch's: benchmarks/training/compare.py has them.
"""

import argparse
import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.report import default_folder
from benchmarks.harness.team import GIB, Team
from benchmarks.training.job import batch
from benchmarks.training.models import SHAPES, USUAL
from benchmarks.training.systems import OURS, Setting, ours, predicted

_ENTRIES = 2_000_000
# Parts of the paths of files that say what a tensor is for, innermost first.
_TELLING = ("ring_attn/", "torch_bridge/", "transformers/", "torch/optim/", "distributed/fsdp/", "benchmarks/")
BEFORE, ELSE = "before", "gradients and others"
# What a place belongs to: the first of these whose words are in it.
PARTS = {
    "layers' inputs": ("checkpoint.py:", "modeling_layers.py:"),
    "the loss": ("loss",),
    "attention": ("call/", "backends/", "arguments/", "functional.py:"),
    "tiles of MLPs and norms": ("tiles.py:",),
    "FSDP2's weights and gradients": ("_fully_shard/", "optim/"),
    "a layer's insides": ("modeling_", "transformers/"),
}
_SAMPLES = 400


class Event(NamedTuple):
    """``size``: more or less, bytes; ``place``: of what was made."""

    size: int
    place: str


def events(trace: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Of torch's ``device_traces``: what was made, and let go. What was made before is not told when it goes."""
    made: dict[int, Event] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            made[entry["addr"]] = Event(entry["size"], place_of(entry.get("frames", ())))
            yield made[entry["addr"]]
        elif entry["action"] == "free_requested":
            size, place = made.pop(entry["addr"], Event(entry["size"], BEFORE))
            yield Event(-size, place)


def place_of(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost two lines that tell something."""
    told = [frame for frame in frames if any(part in frame["filename"] for part in _TELLING)]
    names = (f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}" for frame in told[:2])
    return " < ".join(names) or "autograd's own thread"


def part_of(place: str) -> str:
    if place == BEFORE:
        return BEFORE
    return next((part for part, words in PARTS.items() if any(word in place for word in words)), ELSE)


def at_the_peak(found: list[Event]) -> tuple[int, Counter[str]]:
    """Bytes beyond those before, and of which places."""
    now, most, when = 0, 0, 0
    for number, event in enumerate(found):
        now += event.size
        if now > most:
            most, when = now, number + 1
    there: Counter[str] = Counter()
    for event in found[:when]:
        there[event.place] += event.size
    return most, there


def over_the_step(found: list[Event], before: int) -> dict[str, list[float]]:
    """GiB of each part, in the order of allocations, at some of them. The highest of each stretch is among them."""
    now = Counter({BEFORE: before})
    stretch = max(1, len(found) // _SAMPLES)
    lines: dict[str, list[float]] = {part: [] for part in (BEFORE, *PARTS, ELSE)}
    most, highest = -1, Counter(now)
    for number, event in enumerate(found):
        now[part_of(event.place)] += event.size
        if (total := now.total()) > most:
            most, highest = total, Counter(now)
        if number % stretch == stretch - 1 or number == len(found) - 1:
            for part, line in lines.items():
                line.append(round(highest[part] / GIB, 3))
            most = -1
    return lines


def recorded(system: str, setting: Setting, tokens: int, team: Team, mesh: DeviceMesh) -> tuple[int, list[Event]]:
    """Bytes before the second step, and what that one made and let go."""
    step = ours(OURS[system], setting, mesh)
    generator = torch.Generator().manual_seed(0)
    step(batch(generator, tokens, team.device))
    team.ready()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_ENTRIES)
    step(batch(generator, tokens, team.device))
    team.ready()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return before, list(events(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", choices=OURS)
    parser.add_argument("--tokens", type=int, default=2**17, help="of all GPUs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", choices=SHAPES, default=USUAL)
    parser.add_argument("--output", type=Path, default=default_folder("anatomy"))
    options = parser.parse_args()
    team = Team(timeout=300)
    setting = Setting(sharded=True, layers=options.layers, of=options.model)
    mesh = init_device_mesh("cuda", (team.size,), mesh_dim_names=("cp",))
    kept = {"tokens": options.tokens // team.size, "layers": options.layers, "model": options.model, "systems": {}}
    for system in options.systems:
        before, found = recorded(system, setting, options.tokens, team, mesh)
        most, there = at_the_peak(found)
        plan = predicted(system, setting, team.size, options.tokens // team.size)
        kept["systems"][system] = over_the_step(found, before)
        if team.rank == 0:
            print(f"{system}, {options.tokens} tokens on {team.size} GPUs: {(before + most) / GIB:.2f} GiB, {json.dumps(plan)}")
            print(f"  {before / GIB:6.2f} {BEFORE}")
            for name, size in there.most_common(30):
                print(f"  {size / GIB:6.2f} {name}")
        gc.collect()
        torch.cuda.empty_cache()
    if team.rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "anatomy.json").write_text(json.dumps(kept), encoding="utf-8")
    team.close()


if __name__ == "__main__":
    main()
