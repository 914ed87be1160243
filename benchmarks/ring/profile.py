"""Where a pass of the ring spends its time, and a plot of one GPU's streams: do rotations overlap with kernels?

python -m benchmarks.ring.profile FOLDER [PICTURE]    # remakes the plot from FOLDER/timeline.json
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.harness.report import short
from benchmarks.harness.streams import Event, recorded, split
from benchmarks.harness.team import tidy
from benchmarks.ring.run import Run

ROTATION, COPY, REST = "rotation (NCCL)", "copies and fills", "other kernels"
COLOURS = {ROTATION: "#d62728", COPY: "#7f7f7f", REST: "#c7c7c7"}
KINDS = ("attention", "other kernels", "copies", "rotation alone", "nothing")
KERNEL_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")  # for the kernels that take longest


def profile(run: Run) -> None:
    """Where the time of each system's passes goes, and the plot of the first one's."""
    tokens, name = run.options.profile_tokens, f"profile, {short(run.options.profile_tokens)} tokens"
    for number, system in enumerate(run.options.profile_systems):
        made = run.prepare(run.case(name, tokens), system, run.shards(tokens // run.team.size), run.group(system))
        if made is None:
            continue
        for phase in ("forward", "both"):
            events = recorded(made.passes[phase].call, run.team.ready)
            if events:
                run.report.add(case=name, system=system, phase=phase, **summary(events), **split(events, kind, KINDS))
            if events and run.report.folder is not None and phase == "both" and number == 0:
                keep(events, run.report.folder, f"{short(tokens)} tokens, {run.team.size} GPUs, {system}", run.team.size)
        made.opened.close()
        tidy()


def keep(events: list[Event], folder: Path, what: str, size: int) -> None:
    title = f"{what}, forward and backward: the streams of one GPU"
    (folder / "timeline.json").write_text(json.dumps({"title": title, "size": size, "events": events}) + "\n")
    draw(events, size, title, folder / "timeline.png")


def summary(events: list[Event]) -> dict[str, float]:
    """Milliseconds: the whole pass, the rotations (including waiting for other ranks), and how much of those overlapped kernels."""
    span = max((event.end for event in events), default=0.0)
    busy = np.zeros(round(10 * span), bool)  # in each tenth of a microsecond: whether a kernel runs
    for event in events:
        busy[event.tenths] |= event.is_kernel
    rotations = [event for event in events if event.is_rotation]
    rotation = sum(event.length for event in rotations)
    hidden = sum(busy[event.tenths].sum() / 10 for event in rotations)
    share = round(100 * hidden / rotation, 1) if rotation else 0.0
    return {"span ms": span / 1000, "kernels ms": busy.sum() / 10_000, "rotation ms": rotation / 1000, "beside kernels %": share}


def kind(event: Event) -> str:
    if event.is_rotation:
        return "rotation alone"
    return "copies" if event.is_copy else "attention" if event.is_attention else "other kernels"


def windows(events: list[Event], size: int) -> list[tuple[str, float, float]]:
    """What to show: the whole pass, and one step each of forward and backward, from one rotation's start to the next one's."""
    shown = [("the whole", 0.0, max((event.end for event in events), default=1.0))]
    starts = [event.start for event in events if event.is_rotation]
    for name, number in (("one step of the forward", (size - 1) // 2), ("one step of the backward", size - 1 + size // 2)):
        if number + 1 < len(starts):
            margin = 0.15 * (starts[number + 1] - starts[number])
            shown.append((name, starts[number] - margin, starts[number + 1] + margin))
    return shown


def shade(event: Event) -> str:
    return COLOURS[ROTATION if event.is_rotation else COPY if event.is_copy else REST]


def draw(events: list[Event], size: int, title: str, path: Path) -> None:
    time: Counter[str] = Counter()
    for event in events:
        time[event.name] += int(event.length * 1000) if event.is_kernel else 0
    longest = [name for name, length in time.most_common(len(KERNEL_COLOURS)) if length]
    colours = COLOURS | dict(zip(longest, KERNEL_COLOURS, strict=False))
    streams = sorted({event.stream for event in events}, key=lambda stream: (len(stream), stream))
    shown = windows(events, size)
    figure = Figure(figsize=(12, 1.5 + len(shown) * (1.1 + 0.35 * len(streams))), layout="constrained")
    for panel, (name, start, end) in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        for row, stream in enumerate(streams):
            inside = [event for event in events if event.stream == stream and event.end > start and event.start < end]
            bars = [((event.start - start) / 1000, event.length / 1000) for event in inside]
            shades = [colours.get(event.name, shade(event)) for event in inside]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=shades)
        panel.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams], fontsize=7)
        panel.set_xlim(0, (end - start) / 1000)
        panel.set_title(name, fontsize=9, loc="left")
    panel.set_xlabel("ms")
    patches = [Patch(color=colour, label=name[:60]) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncol=3, fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kept = json.loads((folder / "timeline.json").read_text())
    chosen = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "timeline.png"
    draw([Event(*event) for event in kept["events"]], kept["size"], kept["title"], chosen)
