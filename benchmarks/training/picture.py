"""README's picture: memory and tokens a second of a whole model in training, drawn from a kept result.

    python -m benchmarks.training.picture benchmarks/results/2026-11-25-train-2xH100-replicated

writes docs/pictures/training-light.svg and -dark.svg.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.report import ROOT

SYSTEMS = {"ring-attn": "ring-attn", "context_parallel, allgather": "torch context_parallel"}
CASES = ("4k", "16k", "64k", "128k")
GROUNDS = {"light": ("#24292f", ("#0969da", "#8c959f")), "dark": ("#e6edf3", ("#58a6ff", "#8b949e"))}
WIDTH = 0.38


def main(folder: str) -> None:
    rows = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["rows"]
    matplotlib.rcParams["svg.hashsalt"] = "ring-attn"  # the same result draws the same file
    for ground, (ink, colours) in GROUNDS.items():
        place = ROOT / f"docs/pictures/training-{ground}.svg"
        picture(rows, ink, colours).savefig(place, transparent=True, metadata={"Date": None})
        print(place)


def picture(rows: list[dict[str, Any]], ink: str, colours: tuple[str, str]) -> Figure:
    figure = Figure(figsize=(6.2, 3), layout="constrained")  # so narrow that a phone's screen leaves its words readable
    memory, speed = figure.subplots(1, 2)
    bars(memory, rows, "device, GiB", ink, colours)
    bars(speed, rows, "tokens/s", ink, colours)
    memory.set_title("Memory of each GPU, GiB\n(less is better)", color=ink, fontsize=12)
    speed.set_title("Thousand tokens a second\n(more is better)", color=ink, fontsize=12)
    memory.legend(frameon=False, labelcolor=ink, loc="upper left", fontsize=11)
    return figure


def bars(axes: Axes, rows: list[dict[str, Any]], name: str, ink: str, colours: tuple[str, str]) -> None:
    scale = 1000 if name == "tokens/s" else 1
    for side, (system, label) in enumerate(SYSTEMS.items()):
        of_it = {row["case"].split(",")[0]: row[name] / scale for row in rows if row["system"] == system and name in row}
        places = [place + (side - 0.5) * WIDTH for place in range(len(CASES))]
        drawn = axes.bar(places, [of_it[case] for case in CASES], WIDTH, label=label, color=colours[side])
        axes.bar_label(drawn, fmt="%.2g", color=ink, fontsize=11, padding=2)
    axes.set_xticks(range(len(CASES)), CASES, color=ink, fontsize=11)
    axes.set_xlabel("tokens", color=ink, fontsize=11)
    axes.set_yticks([])
    axes.margins(y=0.15)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
