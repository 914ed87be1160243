"""The results of a benchmark: saved as JSON after every row, shown as a markdown table and a plot.

python -m benchmarks.harness.report FOLDER    # remakes table and plot from FOLDER/results.json, even for an interrupted run
"""

import csv
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.harness.team import versions

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
KEY = ("case", "system", "phase")
NO_FIGURES = (*KEY, "failed", "samples", "spread")


def default_folder(name: str) -> Path:
    return RESULTS / f"{datetime.date.today().isoformat()}-{name}"


def gpus() -> list[dict[str, str]]:
    """Current name, driver, clocks, temperature and power of every GPU; empty without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return list(csv.DictReader(printed.splitlines(), GPU_FIELDS, skipinitialspace=True))


def short(number: int) -> str:
    """16384 as 16k, 2**20 as 1M."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if number and number % unit == 0:
            return f"{number // unit}{letter}"
    return str(number)


def command() -> str:
    """The command line from the repository's root, without the output folder on this machine."""
    given = sys.argv[1:]
    if "--output" in given:
        place = given.index("--output")
        given = given[:place] + given[place + 2 :]
    program = Path(sys.argv[0])
    return shlex.join([str(program.relative_to(ROOT) if program.is_relative_to(ROOT) else program.name), *given])


class Report:
    """Collects rows and writes them as they arrive, so that an interrupted run keeps what it measured.

    A row has `case`, `system` and `phase`, and either figures (`ms`, `tflops`, ...) or `failed`, the reason. A folder of None
    keeps everything in memory: in a job of several processes one of them writes.
    """

    def __init__(self, folder: Path | None, title: str):
        self.folder = folder
        self.data: dict[str, Any] = {
            "title": title,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command(),
            "versions": versions(),
            "gpus_before": self.gpus(),
            "rows": [],
            "ratios": [],
        }
        self.save()

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def gpus(self) -> list[dict[str, str]]:
        return gpus() if self.folder is not None else []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.save()
        figures = [f"FAILED: {row['failed']}"] if "failed" in row else [f"{k} {_shown(v)}" for k, v in row.items() if k not in KEY]
        self.say(f"{row['case']:34} {row['system']:26} {row['phase']:9} {'  '.join(figures)}")

    def ratio(self, name: str, value: float | None, at_least: float | None = None, at_most: float | None = None) -> None:
        """A figure with its target. A value of None (part of it was not measured) is reported as such and counts as not met."""
        target = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        met = value is not None and (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        self.data["ratios"].append({"name": name, "value": value, "target": target, "met": met})
        self.save()
        self.say(" | ".join(_ratio_cells(self.data["ratios"][-1])))

    def speedup(self, case: str, system: str, peer: str, phase: str, at_least: float) -> None:
        """The speedup over the peer."""
        mine, theirs = self.find(case, system, phase), self.find(case, peer, phase)
        self.ratio(f"{case} {phase}: {system} / {peer}", theirs / mine if mine and theirs else None, at_least=at_least)

    def note(self, name: str, value: Any) -> None:
        self.data[name] = value
        self.save()

    def say(self, text: str) -> None:
        if self.folder is not None:
            print(text, flush=True)

    def find(self, case: str, system: str, phase: str, key: str = "ms") -> float | None:
        """The figure of a row, None where there is none."""
        found = (
            row[key] for row in self.rows if (row["case"], row["system"], row["phase"]) == (case, system, phase) and key in row
        )
        return next(found, None)

    def save(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / "results.json.partial"
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(partial, self.folder / "results.json")
        (self.folder / "table.md").write_text(table(self.data))

    def finish(self) -> None:
        if self.folder is not None:
            self.note("gpus_after", gpus())
            plot(self.data, self.folder / "plot.png")
            print(f"\n{table(self.data)}\nwritten: {self.folder}", flush=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def table(data: dict[str, Any]) -> str:
    """Everything in markdown: machine and versions, the targets, and one table per case with a line per system."""
    gpu = data["gpus_before"][0] if data["gpus_before"] else {}
    words = ", ".join(map(" ".join, data["versions"].items()))
    machine = f"{len(data['gpus_before'])} x {gpu['name']}, driver {gpu['driver_version']}" if gpu else "no GPU"
    took = f" ({data['seconds']} s)" if "seconds" in data else ""
    lines = [f"# {data['title']}", "", f"{data['date']}, {machine}; {words}.", "", f"`{data['command']}`{took}", "", *_clocks(data)]
    if data["ratios"]:
        lines += [
            "## Against the targets",
            "",
            *markdown(("ratio", "measured", "target", ""), map(_ratio_cells, data["ratios"])),
            "",
        ]
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        lines += [f"## {case}", "", *_case_table([row for row in data["rows"] if row["case"] == case]), ""]
    return "\n".join(lines)


def _clocks(data: dict[str, Any]) -> list[str]:
    moments = [(name, data[f"gpus_{name}"][0]) for name in ("before", "during", "after") if data.get(f"gpus_{name}")]
    told = [
        f"{name} {gpu['clocks.sm']} / {gpu['clocks.mem']}, {gpu['temperature.gpu']} C, {gpu['power.draw']}" for name, gpu in moments
    ]
    return [f"Clocks (SM / memory) of the first GPU: {'; '.join(told)}.", ""] if told else []


def _ratio_cells(ratio: Row) -> list[str]:
    if ratio["value"] is None:
        return [ratio["name"], "not measured", ratio["target"], ""]
    return [ratio["name"], f"{ratio['value']:.3f}", ratio["target"], "met" if ratio["met"] else "missed"]


def _case_table(rows: list[Row]) -> list[str]:
    """A line per system; a column for each figure of each phase that any system has."""
    columns = dict.fromkeys((row["phase"], key) for row in rows for key in row if key not in NO_FIGURES)
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        if "failed" not in row:
            cells.setdefault(row["system"], {}).update({(row["phase"], key): _shown(value) for key, value in row.items()})
    lines = [[system, *(found.get(column, "") for column in columns)] for system, found in cells.items()]
    failures = [f"- {row['system']}, {row['phase']}: {row['failed']}" for row in rows if "failed" in row]
    shown = markdown(["system", *map(" ".join, columns)], lines) if columns else []
    return [*shown, "", *failures] if failures else shown


def plot(data: dict[str, Any], path: Path) -> None:
    """Bars of TFLOP/s: one panel per phase, one group per case, one colour per system. Nothing is drawn without such rows."""
    rows = [row for row in data["rows"] if "tflops" in row]
    if not rows:
        return
    phases, cases, systems = (list(dict.fromkeys(row[key] for row in rows)) for key in ("phase", "case", "system"))
    figure = Figure(figsize=(max(8, 1.8 * len(cases)), 3.6 * len(phases)), layout="tight")
    panels, width = figure.subplots(len(phases), squeeze=False)[:, 0], 0.85 / len(systems)
    for panel, phase in zip(panels, phases, strict=True):
        for number, system in enumerate(systems):
            found = {row["case"]: row["tflops"] for row in rows if (row["phase"], row["system"]) == (phase, system)}
            places = [cases.index(case) - 0.425 + width * number for case in found]
            panel.bar(places, list(found.values()), width, align="edge", label=system, color=colormaps["tab20"](number % 20))
        panel.set_xticks(range(len(cases)), cases, rotation=12, fontsize=7)
        panel.set_ylabel("TFLOP/s per GPU")
        panel.set_title(phase, fontsize=9)
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize=6, ncol=4)
    figure.suptitle(f"{data['title']}, {data['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    kept = json.loads((chosen / "results.json").read_text())
    (chosen / "table.md").write_text(table(kept))
    plot(kept, chosen / "plot.png")
