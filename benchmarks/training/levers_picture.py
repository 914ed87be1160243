"""docs/long-context.md's picture: a GPU's memory during a step with one lever more in each panel, drawn from what anatomy.py kept.

    python -m benchmarks.training.levers_picture FOLDER

writes docs/pictures/memory.svg.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.harness.report import ROOT

COLOURS = {
    "before": "#4477aa",
    "layers' inputs": "#ee6677",
    "attention": "#228833",
    "the loss": "#aa3377",
    "the MLP's tiles": "#66ccee",
    "gathered weights": "#bbbbbb",
    "a layer's insides": "#ccbb44",
    "gradients and others": "#777777",
}
ROWS, COLUMNS = 2, 3


def main(folder: str) -> None:
    kept = json.loads((Path(folder) / "anatomy.json").read_text(encoding="utf-8"))
    matplotlib.rcParams["svg.hashsalt"] = "ring-attn"  # the same result draws the same file
    place = ROOT / "docs/pictures/memory.svg"
    picture(kept["systems"]).savefig(place, metadata={"Date": None})
    print(place)


def picture(systems: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(ROWS, COLUMNS, sharey=True).flat
    for axes, (system, lines) in zip(panels, systems.items(), strict=False):
        parts = [part for part in COLOURS if part in lines]
        peak = max(map(sum, zip(*lines.values(), strict=True)))
        axes.stackplot(
            range(len(lines[parts[0]])), *(lines[part] for part in parts), labels=parts, colors=[COLOURS[part] for part in parts]
        )
        axes.set_title(f"{system.removeprefix('ring-attn, ')}: {peak:.0f} GiB", fontsize=11)
        axes.set_xticks([])
        axes.margins(x=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.supylabel("GiB of tensors", fontsize=11)
    figure.supxlabel("a step, forward and backward, in the order of allocations", fontsize=11)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=10)
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
