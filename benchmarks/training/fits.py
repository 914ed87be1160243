"""How many tokens train on a number of GPUs: the formula of ``ring_attn.memory``, compared with what was measured.

python -m benchmarks.training.fits            # each measured row beside the formula
python -m benchmarks.training.fits --write    # the table in docs/performance.md
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness.report import ROOT
from ring_attn.memory import Levers, Setting, Shapes, peak
from ring_attn.memory.formula import GIB
from ring_attn.memory.planning import room
from ring_attn.memory.shapes import KNOWN
from tools import marks

PAGE = ROOT / "docs/performance.md"
RUNS = {
    "2026-11-25-train-2xH100-replicated": ("ring-attn", "ring-attn, attention again"),
    "2026-11-26-train-2xH200": ("ring-attn",),
    "2026-11-26-train-2xH200-fsdp": ("ring-attn",),
    "2026-11-23-train-2xH200-fsdp": ("ring-attn",),
    "2026-11-23-train-2xH200-deep": ("ring-attn",),
    "2026-11-23-train-2xH200-fsdp-no-checkpointing": ("ring-attn",),
    "2026-11-23-train-2xH200-replicated-no-checkpointing": ("ring-attn",),
}
TOKENS = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "128k": 2**17, "256k": 2**18}  # of all ranks
MEASURED = Shapes(12, 2048, 6144, 32, 8, 128, 32000)
MODELS = {"Llama 3.2 1B": KNOWN["Llama-3.2-1B"], "Qwen3 8B": KNOWN["Qwen3-8B"], "Qwen3 32B": KNOWN["Qwen3-32B"]}


def tensors(model: Shapes, setting: Setting, tokens: int) -> tuple[float, float]:
    """Bytes of torch's tensors at the peak, with ``tokens`` on each GPU: of those that stay, and of those that come and go."""
    found = peak(model, setting, tokens)
    return found.states, found.held + found.work


def device(model: Shapes, setting: Setting, tokens: int) -> float:
    """Bytes taken of each GPU."""
    return peak(model, setting, tokens).device


def fitting(model: Shapes, setting: Setting) -> int:
    """The most tokens of a row, over all GPUs, in thousands (1,024); 0 if not one fits."""
    most = 0
    for step in (2**power for power in range(14, -1, -1)):
        if device(model, setting, (most + step) * 1024) <= room(80):
            most += step
    return most * setting.gpus


def measured() -> Iterator[tuple[str, Shapes, Setting, int, float, float]]:
    """Each row that was measured: its name, what it was, the tokens of a GPU, GiB of tensors and of the device."""
    for name, systems in RUNS.items():
        found = json.loads((ROOT / "benchmarks/results" / name / "results.json").read_text(encoding="utf-8"))
        layers = 36 if "--layers 36" in found["command"] else 12
        model = replace(MEASURED, layers=layers)
        for row in found["rows"]:
            tokens, _, setting = row["case"].partition(", ")
            if tokens in TOKENS and row["system"] in systems and "device, GiB" in row:
                kept = name >= "2026-11-25" and row["system"] == "ring-attn"  # before that nothing was kept
                levers, without = Levers("attention" if kept else None), "no checkpointing" in setting
                what = Setting(2, "FSDP2" in setting, not without, levers)
                figures = (row["torch's peak, GiB"], row["device, GiB"])
                yield f"{name}: {row['case']}, {row['system']}", model, what, TOKENS[tokens] // 2, *figures


def table() -> str:
    columns = (1, 2, 8, 32)
    lines = ["| |" + "".join(f" {gpus} GPU{'s' * (gpus > 1)} |" for gpus in columns), "|---|" + "---|" * len(columns)]
    for name, model in MODELS.items():
        for kept in ("attention", None):
            fits = (fitting(model, Setting(gpus, levers=Levers(kept, loss_chunk=1024))) for gpus in columns)
            lines.append(f"| {name}{'' if kept else ', attention computed again'} |" + "".join(f" {n or '-'} |" for n in fits))
    return "\n".join(lines)


def written(page: str) -> str:
    return marks.written(page, {"what fits": table()}, "benchmarks/training/fits.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, model, setting, tokens, most, taken in measured():
        ours, whole = sum(tensors(model, setting, tokens)) / GIB, device(model, setting, tokens) / GIB
        print(f"{name:78} tensors {ours:5.2f}, measured {most:5.2f}, {ours / most:.2f}", end="; ")
        print(f"device {whole:5.2f}, measured {taken:5.2f}, {whole / taken:.2f}")


if __name__ == "__main__":
    main()
