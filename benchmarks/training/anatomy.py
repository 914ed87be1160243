"""What is in a GPU's memory at the peak of a step of training, by what made it: torch's own history of allocations, in one line for
each place in the code, and drawn over the step.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.training.anatomy "ring-attn, and inputs" --tokens 131072 --wide

The first step is not looked at: it compiles, and makes the optimizer's state. What was there before the second begins is one line,
"before". JAX's own buffers are not torch's: benchmarks/training/compare.py has them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.report import default_folder
from benchmarks.harness.team import GIB, Team
from benchmarks.training.job import batch
from benchmarks.training.systems import OURS, Setting, ours, predicted

_ENTRIES = 2_000_000
# Parts of the paths of files that say what a tensor is for, innermost first.
_TELLING = ("ring_attn/", "torch_bridge/", "transformers/", "torch/optim/", "distributed/fsdp/", "benchmarks/")


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
            size, place = made.pop(entry["addr"], Event(entry["size"], "before"))
            yield Event(-size, place)


def place_of(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost two lines that tell something."""
    told = [frame for frame in frames if any(part in frame["filename"] for part in _TELLING)]
    names = (f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}" for frame in told[:2])
    return " < ".join(names) or "autograd's own thread"


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


def draw(found: list[Event], before: int, to: Path, most: int = 7) -> None:
    """The largest places of the peak as layers of one picture, in the order of allocations."""
    from matplotlib.figure import Figure

    _, there = at_the_peak(found)
    names = [name for name, _ in there.most_common(most)]
    lines: dict[str, list[float]] = {name: [] for name in ("before", *names, "else")}
    now = Counter({"before": before})
    for number, event in enumerate(found):
        now[event.place if event.place in names or event.place == "before" else "else"] += event.size
        if number % max(1, len(found) // 300) == 0:
            for name, line in lines.items():
                line.append(now[name] / GIB)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(range(len(lines["else"])), *lines.values(), labels=list(lines))
    axes.set_ylabel("GiB")
    axes.set_xticks([])
    axes.set_xlabel("a step, in the order of allocations")
    axes.legend(fontsize=6, loc="lower left")
    figure.savefig(to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=OURS)
    parser.add_argument("--tokens", type=int, default=2**17, help="of all GPUs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--wide", action="store_true", help="Qwen3-8B's shapes")
    parser.add_argument("--output", type=Path, default=default_folder("anatomy"))
    options = parser.parse_args()
    team = Team(timeout=300)
    setting = Setting(sharded=True, layers=options.layers, wide=options.wide)
    step = ours(OURS[options.system], setting, init_device_mesh("cuda", (team.size,), mesh_dim_names=("cp",)))
    generator = torch.Generator().manual_seed(0)
    step(batch(generator, options.tokens, team.device))
    team.ready()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_ENTRIES)
    step(batch(generator, options.tokens, team.device))
    team.ready()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    found = list(events(trace))
    most, there = at_the_peak(found)
    plan = predicted(options.system, setting, team.size, options.tokens // team.size)
    if team.rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        print(f"{options.system}, {options.tokens} tokens on {team.size} GPUs: {(before + most) / GIB:.2f} GiB, {json.dumps(plan)}")
        print(f"  {before / GIB:6.2f} before")
        for name, size in there.most_common(30):
            print(f"  {size / GIB:6.2f} {name}")
        draw(found, before, options.output / "picture.svg")
    team.close()


if __name__ == "__main__":
    main()
