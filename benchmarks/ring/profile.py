"""Where a pass of the ring spends its time, and a plot of one GPU's streams: do rotations overlap with kernels?

python -m benchmarks.ring.profile FOLDER [PICTURE]    # remakes the plot from FOLDER/timeline.json
"""

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recording

from benchmarks.harness.report import short
from benchmarks.harness.team import ON_GPU, tidy
from benchmarks.harness.timing import Timed
from benchmarks.ring.run import Run

ROTATION, COPY, REST = "rotation (NCCL)", "copies and fills", "other kernels"
COLOURS = {ROTATION: "#d62728", COPY: "#7f7f7f", REST: "#c7c7c7"}
KERNEL_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")  # for the kernels that take longest


class Event(NamedTuple):
    """Something that a stream did; times in microseconds."""

    stream: str
    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return ROTATION if "nccl" in name else COPY if name.startswith(("memcpy", "memset")) else REST

    @property
    def is_attention(self) -> bool:
        """By the names of cuDNN's, flash-attn's and our Triton kernels; not those that only prepare or convert."""
        found = re.search(r"sdpa|flash|^(forward|keys|queries)_kernel", self.name)
        return bool(found) and not re.search(r"process|dot_do_o|convert", self.name, re.IGNORECASE)


def profile(run: Run) -> None:
    """Where the time of each system's passes goes, and the plot of the first one's."""
    tokens, name = run.options.profile_tokens, f"profile, {short(run.options.profile_tokens)} tokens"
    for number, system in enumerate(run.options.profile_systems):
        made = run.prepare(run.case(name, tokens), system, run.shards(tokens // run.team.size), run.group(system))
        if made is None:
            continue
        for phase in ("forward", "both"):
            events = recorded_pass(run, made.passes[phase])
            if events:
                run.report.add(case=name, system=system, phase=phase, **summary(events), **split(events))
            if events and run.report.folder is not None and phase == "both" and number == 0:
                keep(events, run.report.folder, f"{short(tokens)} tokens, {run.team.size} GPUs, {system}", run.team.size)
        made.opened.close()
        tidy()


def keep(events: list[Event], folder: Path, what: str, size: int) -> None:
    title = f"{what}, forward and backward: the streams of one GPU"
    (folder / "timeline.json").write_text(json.dumps({"title": title, "size": size, "events": events}) + "\n")
    draw(events, size, title, folder / "timeline.png")


def recorded_pass(run: Run, both: Timed) -> list[Event]:
    """What this process's GPU did; torch's profiler sees every kernel of the process, JAX's too."""
    with recording(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as recorded:
        run.team.ready()
        both.call()
        run.team.ready()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        return events_of(json.loads(Path(folder, "trace.json").read_text()))


def events_of(trace: dict[str, Any]) -> list[Event]:
    """The events of the GPU's streams, sorted by time, starting at 0."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    first = min((event["ts"] for event in found), default=0.0)
    events = [Event(str(e["args"]["stream"]), e["name"], round(float(e["ts"] - first), 3), float(e["dur"])) for e in found]
    return sorted(events, key=lambda event: event.start)


def summary(events: list[Event]) -> dict[str, float]:
    """Milliseconds: the whole pass, the rotations (including waiting for other ranks), and how much of those overlapped kernels."""
    span = max((event.end for event in events), default=0.0)
    busy = np.zeros(round(10 * span), bool)  # in each tenth of a microsecond: whether a kernel runs
    for event in events:
        busy[_tenths(event)] |= event.kind == REST
    rotations = [event for event in events if event.kind == ROTATION]
    rotation = sum(event.length for event in rotations)
    hidden = sum(busy[_tenths(event)].sum() / 10 for event in rotations)
    share = round(100 * hidden / rotation, 1) if rotation else 0.0
    return {"span ms": span / 1000, "kernels ms": busy.sum() / 10_000, "rotation ms": rotation / 1000, "beside kernels %": share}


def split(events: list[Event]) -> dict[str, float]:
    """Milliseconds of the span, each counted once, as the first that applies: an attention kernel runs; another kernel (joining,
    casts, what surrounds attention); a copy or fill; a rotation alone; nothing."""
    kinds = ("attention", "other kernels", "copies", "rotation alone", "nothing")
    moments = np.full(round(10 * max((event.end for event in events), default=0.0)), len(kinds) - 1)
    for event in events:
        place = {ROTATION: 3, COPY: 2}.get(event.kind, 0 if event.is_attention else 1)
        moments[_tenths(event)] = np.minimum(moments[_tenths(event)], place)
    return {f"{kind} ms": int((moments == number).sum()) / 10_000 for number, kind in enumerate(kinds)}


def _tenths(event: Event) -> slice:
    return slice(round(10 * event.start), round(10 * event.end))


def windows(events: list[Event], size: int) -> list[tuple[str, float, float]]:
    """What to show: the whole pass, and one step each of forward and backward, from one rotation's start to the next one's."""
    shown = [("the whole", 0.0, max((event.end for event in events), default=1.0))]
    starts = [event.start for event in events if event.kind == ROTATION]
    for name, number in (("one step of the forward", (size - 1) // 2), ("one step of the backward", size - 1 + size // 2)):
        if number + 1 < len(starts):
            margin = 0.15 * (starts[number + 1] - starts[number])
            shown.append((name, starts[number] - margin, starts[number + 1] + margin))
    return shown


def draw(events: list[Event], size: int, title: str, path: Path) -> None:
    time: Counter[str] = Counter()
    for event in events:
        time[event.name] += int(event.length * 1000) if event.kind == REST else 0
    longest = [name for name, length in time.most_common(len(KERNEL_COLOURS)) if length]
    colours = COLOURS | dict(zip(longest, KERNEL_COLOURS, strict=False))
    streams = sorted({event.stream for event in events}, key=lambda stream: (len(stream), stream))
    shown = windows(events, size)
    figure = Figure(figsize=(12, 1.5 + len(shown) * (1.1 + 0.35 * len(streams))), layout="constrained")
    for panel, (name, start, end) in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        for row, stream in enumerate(streams):
            inside = [event for event in events if event.stream == stream and event.end > start and event.start < end]
            bars = [((event.start - start) / 1000, event.length / 1000) for event in inside]
            shades = [colours.get(event.name, colours[event.kind]) for event in inside]
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
