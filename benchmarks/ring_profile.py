"""A picture of one GPU's streams during a forward and backward pass of the ring: do rotations run beside kernels?

python benchmarks/ring_profile.py FOLDER [PICTURE]    # the picture again, from FOLDER/timeline.json
"""

import glob
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring import Run

TRAVEL, COPY, REST = "rotation (NCCL)", "copies and fills", "other kernels"
COLOURS = {TRAVEL: "#d62728", COPY: "#7f7f7f", REST: "#c7c7c7"}
KERNEL_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")  # of the kernels that take longest


@dataclass(frozen=True)
class Event:
    """Something that a stream did; times in microseconds."""

    stream: str
    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def profile(run: "Run") -> None:
    import torch.distributed as dist

    from ring_systems import SYSTEMS, make_shards

    tokens, team = run.options.profile_tokens, run.team
    shards = make_shards(tokens // team.size, run.options.heads, team.device, team.rank)
    call = SYSTEMS[run.options.platform].prepare(shards, dist.group.WORLD).both.call
    for _ in range(2):
        call()
    events = by_torch(run, call) if run.options.profiler == "torch" else []
    if not team.agreed(bool(events) or team.rank != 0):  # nothing seen: the other one
        events = by_jax(run, call)
    if team.rank == 0 and run.report.folder is not None:
        title = f"{run.name(tokens)}, {team.size} GPUs, forward and backward: the streams of one GPU"
        kept = {"title": title, "size": team.size, "events": [astuple(event) for event in events]}
        (run.report.folder / "timeline.json").write_text(json.dumps(kept) + "\n")
        run.report.add(case=f"profile, {run.name(tokens)}", system=run.options.platform, phase="both", **summary(events))
        draw(events, team.size, title, run.report.folder / "timeline.png")


def by_torch(run: "Run", call: Callable[[], Any]) -> list[Event]:
    """torch's profiler sees every kernel of the process, JAX's too."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    if run.team.rank != 0:
        one_pass(run, call)
        return []
    activity = ProfilerActivity.CUDA if run.team.on_gpu else ProfilerActivity.CPU
    with recording(activities=[activity]) as recorded:
        one_pass(run, call)
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        return events_of_torch(json.loads(Path(folder, "trace.json").read_text()))


def by_jax(run: "Run", call: Callable[[], Any]) -> list[Event]:
    import jax

    if run.team.rank != 0:
        one_pass(run, call)
        return []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            one_pass(run, call)
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            return events_of_jax(json.load(file))


def one_pass(run: "Run", call: Callable[[], Any]) -> None:
    run.team.ready()
    call()
    run.team.ready()


def events_of_torch(trace: dict[str, Any]) -> list[Event]:
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return in_order([as_event(str(event["args"]["stream"]), event) for event in found])


def events_of_jax(trace: dict[str, Any]) -> list[Event]:
    """Streams are threads of the process that stands for the GPU."""
    told = [event for event in trace["traceEvents"] if event.get("ph") == "M" and event["name"] == "thread_name"]
    streams = {(event["pid"], event["tid"]): event["args"]["name"] for event in told}
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    named = [(streams.get((event["pid"], event["tid"]), ""), event) for event in found]
    wanted = [(stream, event) for stream, event in named if stream.startswith("Stream")]
    return in_order([as_event(stream, event) for stream, event in wanted])


def as_event(stream: str, event: dict[str, Any]) -> Event:
    return Event(stream, event["name"], float(event["ts"]), float(event["dur"]))


def in_order(events: list[Event]) -> list[Event]:
    """By time, from 0 on."""
    first = min((event.start for event in events), default=0.0)
    moved = [Event(event.stream, event.name, round(event.start - first, 3), event.length) for event in events]
    return sorted(moved, key=lambda event: event.start)


def kind(event: Event) -> str:
    name = event.name.lower()
    if "nccl" in name:
        return TRAVEL
    return COPY if name.startswith(("memcpy", "memset")) else REST


def summary(events: list[Event]) -> dict[str, Any]:
    """Milliseconds: of the whole, of rotations (also their waiting for other ranks), and how much of those ran beside kernels."""
    travel = [event for event in events if kind(event) == TRAVEL]
    kernels = union([event for event in events if kind(event) == REST])
    hidden = sum(max(0.0, min(event.end, end) - max(event.start, start)) for event in travel for start, end in kernels)
    rotation = sum(event.length for event in travel)
    whole = max((event.end for event in events), default=0.0)
    busy = sum(end - start for start, end in kernels)
    share = round(100 * hidden / rotation, 1) if rotation else 0.0
    return {"span ms": whole / 1000, "kernels ms": busy / 1000, "rotation ms": rotation / 1000, "beside kernels %": share}


def union(events: list[Event]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if joined and event.start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], event.end)
        else:
            joined.append((event.start, event.end))
    return joined


def windows(events: list[Event], size: int) -> list[tuple[str, float, float]]:
    """What to show: the whole, and one step of the forward and of the backward, each from one rotation's start to the next's."""
    shown = [("the whole", 0.0, max((event.end for event in events), default=1.0))]
    starts = [event.start for event in events if kind(event) == TRAVEL]
    for name, number in (("one step of the forward", (size - 1) // 2), ("one step of the backward", size - 1 + size // 2)):
        if number + 1 < len(starts):
            length = starts[number + 1] - starts[number]
            shown.append((name, starts[number] - 0.15 * length, starts[number + 1] + 0.15 * length))
    return shown


def draw(events: list[Event], size: int, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    time: Counter[str] = Counter()
    for event in events:
        if kind(event) == REST:
            time[event.name] += int(event.length * 1000)
    colours = COLOURS | dict(zip((name for name, _ in time.most_common(len(KERNEL_COLOURS))), KERNEL_COLOURS, strict=False))
    streams = sorted({event.stream for event in events}, key=lambda stream: (len(stream), stream))
    shown = windows(events, size)
    height = 1.5 + len(shown) * (1.1 + 0.35 * len(streams))
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(12, height), squeeze=False)
    for panel, (name, start, end) in zip(panels[:, 0], shown, strict=True):
        for row, stream in enumerate(streams):
            inside = [event for event in events if event.stream == stream and event.end > start and event.start < end]
            bars = [((event.start - start) / 1000, event.length / 1000) for event in inside]
            shades = [colours.get(event.name, colours[kind(event)]) for event in inside]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=shades)
        panel.set_yticks(range(len(streams)), [f"stream {stream.removeprefix('Stream #')}" for stream in streams], fontsize=7)
        panel.set_xlim(0, (end - start) / 1000)
        panel.set_title(name, fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("ms")
    patches = [Patch(color=colour, label=name[:60]) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="lower center", ncol=3, fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.9 / height, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kept = json.loads((folder / "timeline.json").read_text())
    chosen = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "timeline.png"
    draw([Event(*event) for event in kept["events"]], kept["size"], kept["title"], chosen)
