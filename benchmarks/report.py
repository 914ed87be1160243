"""What a benchmark measured: kept as JSON after every row, shown as a markdown table and a plot.

python benchmarks/report.py FOLDER    # table and plot again from FOLDER/results.json, also of a run that was cut off
"""

import datetime
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "ring-flash-attn", "ejkernel")
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")


def default_folder(name: str) -> Path:
    return RESULTS / f"{datetime.date.today().isoformat()}-{name}"


def versions() -> dict[str, str]:
    """Of everything whose change could change a figure; a package that is not there is left out."""
    import torch

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def gpus() -> list[dict[str, str]]:
    """Name, driver, clocks, heat and power of every GPU at this moment; empty without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, line.split(", "), strict=False)) for line in printed.strip().splitlines()]


def short(number: int) -> str:
    """16384 as 16k, 2**20 as 1M."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if number and number % unit == 0:
            return f"{number // unit}{letter}"
    return str(number)


def command() -> str:
    """As it was called, but for where on this machine the results went."""
    given = sys.argv[1:]
    if "--output" in given:
        place = given.index("--output")
        given = given[:place] + given[place + 2 :]
    return shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *given])


class Report:
    """Collects rows and writes them as they come, so that a run that is cut off leaves what it measured.

    A row has ``case``, ``system`` and ``phase``, and either figures (``ms``, ``tflops``, ...) or ``failed``, the reason. A folder
    of None keeps everything in memory: in a job of several processes one of them writes.
    """

    def __init__(self, folder: Path | None, title: str):
        self.folder = folder
        self.data: dict[str, Any] = {
            "title": title,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command(),
            "versions": versions(),
            "gpus_before": gpus() if folder is not None else [],
            "rows": [],
            "ratios": [],
        }
        self.save()

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.save()
        self.say(_line(row))

    def ratio(self, name: str, value: float | None, at_least: float | None = None, at_most: float | None = None) -> None:
        """A figure with its target. A value of None (something in it was not measured) is said, and is not met."""
        target = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        met = value is not None and (value >= at_least if at_least is not None else value <= (at_most or 0.0))
        self.data["ratios"].append({"name": name, "value": value, "target": target, "met": met})
        self.save()
        shown = "not measured" if value is None else f"{value:.3f}"
        self.say(f"{'met   ' if met else 'MISSED' if value is not None else '-     '} {name}: {shown} (target {target})")

    def note(self, name: str, value: Any) -> None:
        self.data[name] = value
        self.save()

    def say(self, text: str) -> None:
        if self.folder is not None:
            print(text, flush=True)

    def find(self, case: str, system: str, phase: str, key: str = "ms") -> float | None:
        """The figure of a row, None where there is none."""
        for row in self.rows:
            if (row["case"], row["system"], row["phase"]) == (case, system, phase) and key in row:
                return row[key]
        return None

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


def _line(row: Row) -> str:
    head = f"{row['case']:34} {row['system']:26} {row['phase']:9}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    return f"{head} " + "  ".join(f"{key} {_shown(row[key])}" for key in row if key not in ("case", "system", "phase", "samples"))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def table(data: dict[str, Any]) -> str:
    """All of it in markdown: where and with what, the targets, and one table a case, a system in each line."""
    gpu = data["gpus_before"][0] if data["gpus_before"] else {}
    words = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    machine = f"{len(data['gpus_before'])} x {gpu['name']}, driver {gpu['driver_version']}" if gpu else "no GPU"
    lines = [f"# {data['title']}", "", f"{data['date']}, {machine}; {words}.", "", f"`{data['command']}`", ""]
    lines += _clocks(data)
    if data["ratios"]:
        lines += ["## Against the targets", "", "| ratio | measured | target | |", "|---|---|---|---|"]
        lines += [_ratio_line(ratio) for ratio in data["ratios"]] + [""]
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        lines += _case_table(case, [row for row in data["rows"] if row["case"] == case])
    return "\n".join(lines)


def _clocks(data: dict[str, Any]) -> list[str]:
    moments = [(name, data.get(f"gpus_{name}")) for name in ("before", "during", "after")]
    told = [
        f"{name} {found[0]['clocks.sm']} / {found[0]['clocks.mem']}, {found[0]['temperature.gpu']} C, {found[0]['power.draw']}"
        for name, found in moments
        if found
    ]
    return [f"Clocks (SM / memory) of the first GPU: {'; '.join(told)}.", ""] if told else []


def _ratio_line(ratio: Row) -> str:
    value = "not measured" if ratio["value"] is None else f"{ratio['value']:.3f}"
    return f"| {ratio['name']} | {value} | {ratio['target']} | {'met' if ratio['met'] else 'missed' if ratio['value'] else ''} |"


def _case_table(case: str, rows: list[Row]) -> list[str]:
    """A line for each system; a column for each figure of each phase that any of them has."""
    keys = [key for row in rows for key in row if key not in ("case", "system", "phase", "failed", "samples", "spread")]
    columns = [(phase, key) for phase in dict.fromkeys(row["phase"] for row in rows) for key in dict.fromkeys(keys)]
    columns = [(phase, key) for phase, key in columns if any(row["phase"] == phase and key in row for row in rows)]
    lines = [f"## {case}", ""]
    if columns:
        lines += ["| system | " + " | ".join(f"{phase} {key}" for phase, key in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for system in dict.fromkeys(row["system"] for row in rows):
        own = {row["phase"]: row for row in rows if row["system"] == system and "failed" not in row}
        if own:
            cells = [_shown(own.get(phase, {}).get(key, "")) for phase, key in columns]
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    failures = [f"- {row['system']}, {row['phase']}: {row['failed']}" for row in rows if "failed" in row]
    return [*lines, "", *failures, ""] if failures else [*lines, ""]


def plot(data: dict[str, Any], path: Path) -> None:
    """Bars of TFLOP/s: one panel a phase, one group of bars a case, one colour a system. Nothing without such rows, or
    without matplotlib."""
    rows = [row for row in data["rows"] if "tflops" in row]
    if not rows or importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases, cases, systems = (list(dict.fromkeys(row[key] for row in rows)) for key in ("phase", "case", "system"))
    figure, panels = pyplot.subplots(len(phases), 1, figsize=(max(8, 1.8 * len(cases)), 3.6 * len(phases)), squeeze=False)
    colours = pyplot.get_cmap("tab20")
    for panel, phase in zip(panels[:, 0], phases, strict=True):
        for number, system in enumerate(systems):
            found = {row["case"]: row["tflops"] for row in rows if (row["phase"], row["system"]) == (phase, system)}
            places = [cases.index(case) + 0.85 * (number / len(systems) - 0.5) for case in found]
            panel.bar(places, list(found.values()), 0.85 / len(systems), align="edge", label=system, color=colours(number % 20))
        panel.set_xticks(range(len(cases)), cases, rotation=12, fontsize=7)
        panel.set_ylabel("TFLOP/s per GPU")
        panel.set_title(phase, fontsize=9)
        panel.grid(axis="y", alpha=0.3)
    panels[0, 0].legend(fontsize=6, ncol=4)
    figure.suptitle(f"{data['title']}, {data['date'][:10]}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    kept = json.loads((chosen / "results.json").read_text())
    (chosen / "table.md").write_text(table(kept))
    plot(kept, chosen / "plot.png")
