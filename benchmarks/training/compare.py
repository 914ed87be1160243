"""A whole model in training: this library beside torch's context parallelism and accelerate's, on equal terms.

    python -m benchmarks.training.compare [--gpus 2] [--systems ...] [--settings ...] [--rows ...] [--layers 36] [--time 900]
    python -m benchmarks.training.compare --model Qwen3-8B --settings FSDP2 --rows 256k 512k --systems "ring-attn, and inputs"

Qwen3 (random, of transformers): 12 layers, hidden 2048, 32 query heads on 8 K/V heads of 128, a vocabulary of 32,000, AdamW;
--model takes sizes of others (models.py).
Rows are numbers of tokens in all; "lengths": twelve steps of lengths never met before, then the same again; "16 documents in 64k":
packed, of uneven lengths. Each system and setting is a job of its own (job.py), and sees the same batches in the
same order from the same weights, so losses can be compared. Seconds a step are medians, of the slowest rank; memory is of the rank
that has most: the peak of torch's allocator, what it reserves, and what is taken of the device (NVML), with contexts and NCCL's
buffers. One step more is recorded by torch's profiler: what the first rank's GPU does, each moment counted once (job.KINDS, in
this order; a collective beside a kernel costs nothing).
"""

import argparse
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import torch

from benchmarks.harness import jobs
from benchmarks.harness.report import Report, default_folder
from benchmarks.training.job import ROWS, SAID
from benchmarks.training.models import SHAPES, USUAL
from benchmarks.training.systems import CONTEXT_PARALLEL, LEVERS, SYSTEMS

# By name: whether FSDP2 shards the weights, activations are checkpointed, torch compiles each layer, its segments grow.
SETTINGS = {
    "replicated": [],
    "replicated, compiled": ["--compiled"],
    "replicated, no checkpointing": ["--no-checkpointing"],
    "FSDP2": ["--sharded"],
    "FSDP2, compiled": ["--sharded", "--compiled"],
    "FSDP2, no checkpointing": ["--sharded", "--no-checkpointing"],
    "FSDP2, expandable segments": ["--sharded", "--expandable"],
}
OURS, PEER, ALONE = "ring-attn", CONTEXT_PARALLEL, "SDPA on one GPU"
PEER_IN_CHUNKS = f"{CONTEXT_PARALLEL}, loss chunk"


def job(report: Report, options: argparse.Namespace, setting: str, system: str, seconds: float) -> None:
    """Adds the rows of one job as they come; those that did not come are told as failed, with the last that the job said."""
    sizes = ["--layers", str(options.layers), "--model", options.model, *["--small"] * options.small]
    settings = [*SETTINGS[setting], *sizes, "--rows", *options.rows]
    gpus = 1 if system == ALONE else options.gpus
    process = jobs.begin(gpus, "benchmarks.training.job", system, *settings, out=subprocess.PIPE, OMP_NUM_THREADS="4")
    limit = threading.Timer(seconds, lambda: os.killpg(process.pid, signal.SIGKILL))
    limit.start()
    left, said = list(options.rows), list[str]()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(SAID):
                told = json.loads(line)
                left.remove(told["row"])
                report.add(case=f"{told['row']}, {setting}", system=system, phase="", **told["found"])
            elif line.strip():
                said.append(line)
        process.wait()
    finally:
        limit.cancel()
        if process.poll() is None:  # this program was interrupted, and the job is a session of its own
            os.killpg(process.pid, signal.SIGKILL)
    for row in left:
        report.add(case=f"{row}, {setting}", system=system, phase="", failed=jobs.first_error(said, "nothing was said in its time"))


# Of a row: how many times as fast as torch's context parallelism a step is to be; with compiled layers, as its step without them.
FASTER = {"4k": 1.1, "16k": 1.2, "64k": 1.3, "128k": 1.3}
FASTER_COMPILED = {"16k": 1.5, "64k": 1.45, "128k": 1.45}


def compare(report: Report, options: argparse.Namespace) -> None:
    """Against the targets: the device's memory and the rate beside torch's, and beside one GPU's."""
    for setting in options.settings:
        compiled = setting.endswith("compiled")
        for row in options.rows:
            case = f"{row}, {setting}"
            _ratio(report, case, "device, GiB", PEER, at_most=0.75 if row == "128k" else 0.97)
            _ratio(report, case, "tokens/s", PEER, at_least=1.25 if compiled else FASTER.get(row, 1.0))
            _ratio(report, case, "tokens/s", ALONE, at_least=1.9)
            for name in LEVERS:
                _ratio(report, case, "tokens/s", PEER_IN_CHUNKS, system=f"ring-attn, {name}", at_least=1.3)
            if compiled:
                _ratio(
                    report,
                    case,
                    "tokens/s",
                    PEER,
                    f"{row}, {setting.removesuffix(', compiled')}",
                    at_least=FASTER_COMPILED.get(row, 1.0),
                )


def _ratio(report: Report, case: str, figure: str, peer: str, of_case: str = "", system: str = OURS, **target: float) -> None:
    """Nothing where one of them was not measured. ``of_case``: the peer's, if it is another."""
    mine, theirs = report.find(case, system, "", figure), report.find(of_case or case, peer, "", figure)
    if mine and theirs:
        name = f"{case}: {figure}, {system} / {peer}" + (f" of {of_case}" if of_case else "")
        report.ratio(name, mine / theirs, **target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[x for x in SYSTEMS if x.removeprefix("ring-attn, ") not in LEVERS]
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[name for name, row in ROWS.items() if row.steps > 1])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--time", type=float, default=900, help="seconds that a job may take")
    parser.add_argument("--model", choices=SHAPES, default=USUAL, help="whose sizes, but for the layers")
    parser.add_argument("--small", action="store_true", help="two small layers and a 64th of the tokens, to see that it runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = options.output or default_folder(f"train-{options.gpus}x{'GPU' if torch.cuda.is_available() else 'CPU'}")
    report = Report(folder, "A transformers model in training")
    for setting in options.settings:
        for system in options.systems:
            job(report, options, setting, system, options.time)
    compare(report, options)
    report.finish()


if __name__ == "__main__":
    main()
