"""docs/long-context.md's picture: a GPU's memory during a step with one lever more in each panel, drawn from what anatomy.py kept.

    python -m benchmarks.training.levers_picture FOLDER

writes docs/pictures/memory.png.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness.report import ROOT

COLOURS = {
    "before": "#4477aa",
    "layers' inputs": "#ee6677",
    "attention": "#228833",
    "the loss": "#aa3377",
    "tiles of MLPs and norms": "#66ccee",
    "FSDP2's weights and gradients": "#bbbbbb",
    "a layer's insides": "#ccbb44",
    "gradients and others": "#777777",
}
NAMES = {"before": "weights and AdamW's states"}
TITLES = {
    "ring-attn": "no lever",
    "ring-attn, loss chunk": "loss_chunk",
    "ring-attn, MLP tile": "and mlp_tile",
    "ring-attn, head groups": "and head_groups",
    "ring-attn, and offload": 'and checkpoint="offload"',
    "ring-attn, and inputs": "and offload_inputs",
}
ROWS, COLUMNS = 2, 3


def main(folder: str) -> None:
    kept = json.loads((Path(folder) / "anatomy.json").read_text(encoding="utf-8"))
    place = ROOT / "docs/pictures/memory.png"
    picture(kept["systems"]).savefig(place, dpi=110)
    print(place)


def picture(systems: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(ROWS, COLUMNS, sharey=True).flat
    for axes, (system, lines) in zip(panels, systems.items(), strict=False):
        parts = [part for part in COLOURS if part in lines]
        names = [NAMES.get(part, part) for part in parts]
        peak = max(map(sum, zip(*lines.values(), strict=True)))
        axes.stackplot(
            range(len(lines[parts[0]])), *(lines[part] for part in parts), labels=names, colors=[COLOURS[part] for part in parts]
        )
        axes.set_title(f"{TITLES.get(system, system)}: {peak:.0f} GiB", fontsize=11)
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
