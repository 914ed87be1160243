"""A whole model in training: this library beside torch's context parallelism and accelerate's, on equal terms.

    python -m benchmarks.training.compare [--gpus 2] [--systems ...] [--settings ...] [--rows ...] [--layers 36] [--time 900]

Qwen3 (random, of transformers): 12 layers, hidden 2048, 32 query heads on 8 K/V heads of 128, a vocabulary of 32,000, AdamW.
Rows are numbers of tokens in all; "lengths": twelve steps of lengths never met before, then the same again; "16 documents in 64k":
packed, of uneven lengths. Each system and setting is a job of its own (job.py), and sees the same batches in the
same order from the same weights, so losses can be compared. Seconds a step are medians, of the slowest rank; memory is of the rank
that has most: the peak of torch's allocator, what it reserves, and what is taken of the device (NVML), with contexts and NCCL's
buffers.
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
from benchmarks.training.systems import SYSTEMS

# By name: whether FSDP2 shards the weights, and whether activations are checkpointed.
SETTINGS = {
    "replicated": [],
    "replicated, no checkpointing": ["--no-checkpointing"],
    "FSDP2": ["--sharded"],
    "FSDP2, no checkpointing": ["--sharded", "--no-checkpointing"],
}
OURS, PEER = "ring-attn", "context_parallel, allgather"


def job(report: Report, options: argparse.Namespace, setting: str, system: str, seconds: float) -> None:
    """Adds the rows of one job as they come; those that did not come are told as failed, with the last that the job said."""
    settings = [*SETTINGS[setting], "--layers", str(options.layers), *["--small"] * options.small, "--rows", *options.rows]
    process = jobs.begin(options.gpus, "benchmarks.training.job", system, *settings, out=subprocess.PIPE, OMP_NUM_THREADS="4")
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


def compare(report: Report, options: argparse.Namespace) -> None:
    """The device's memory and the time of a step, beside torch's."""
    for setting in options.settings:
        for row in options.rows:
            case = f"{row}, {setting}"
            for figure, at_most in (("device, GiB", 0.97), ("seconds", 1.0)):
                mine, theirs = (report.find(case, system, "", figure) for system in (OURS, PEER))
                if mine and theirs:
                    report.ratio(f"{case}: {figure}, {OURS} / {PEER}", mine / theirs, at_most=at_most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[row for row in ROWS if row != "256k"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--time", type=float, default=900, help="seconds that a job may take")
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
