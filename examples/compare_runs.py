"""Starts the two runs of the demo, prints how far apart they are, and plots their loss curves."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")  # writes to a file; there may be no display
from matplotlib import pyplot as plt

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3  # float32: the same sums in two orders, after several optimizer steps


class Run(NamedTuple):
    """What a run saves in its file. ``gradients``: step -> parameter -> gradient."""

    losses: list[float]
    gradients: dict[int, dict[str, Tensor]]
    seconds: float


class Difference(NamedTuple):
    """The largest difference of a step's gradients, relative to the largest entry of the same parameter's gradient."""

    step: int
    relative: float
    parameter: str


def launch(role: str, processes: int) -> None:
    """Runs this command again as ``role``, over ``processes`` processes. Ends the demo if that fails."""
    ring = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if role == "ring" else []
    # Threads that spin while they wait would compete for the cores.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, *ring, *sys.argv, f"--role={role}"]
    code = subprocess.run(command, env={**os.environ, **threads}, check=False).returncode
    if code:
        sys.exit(f"the {role} run failed with exit code {code}; its messages are above")


def compare(ring: Run, single: Run, picture: Path, ring_name: str) -> None:
    """Prints the largest differences and saves the plot. Exits with an error if the runs are not the same training."""
    draw(ring, single, picture, ring_name)
    apart = [abs(a - b) for a, b in zip(ring.losses, single.losses, strict=True)]
    differences = [gradient_difference(ring, single, step) for step in sorted(ring.gradients)]
    print(f"\n{ring_name}, {len(apart)} steps: loss {ring.losses[0]:.4f} -> {ring.losses[-1]:.4f} in {ring.seconds:.0f} s")
    print(f"one process, torch SDPA: loss {single.losses[0]:.4f} -> {single.losses[-1]:.4f} in {single.seconds:.0f} s")
    print(f"The losses differ by at most {max(apart):.1e} (at step {apart.index(max(apart)) + 1}).")
    for step, relative, parameter in differences:
        print(f"At step {step + 1} the gradients differ by at most {relative:.1e} of a parameter's largest gradient ({parameter}).")
    print(f"The two curves: {picture}")
    print(
        "Equal losses and gradients are what this shows. The processes share one machine's cores, so none of it can be faster here."
    )
    if not (max(apart) <= LOSS_TOLERANCE and all(difference.relative <= GRADIENT_TOLERANCE for difference in differences)):
        sys.exit(f"That is too far: the losses must agree within {LOSS_TOLERANCE}, the gradients within {GRADIENT_TOLERANCE}.")


def gradient_difference(ring: Run, single: Run, step: int) -> Difference:
    apart = {name: relative_difference(ring.gradients[step][name], single.gradients[step][name]) for name in ring.gradients[step]}
    worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]))  # NaN counts as the worst
    return Difference(step, apart[worst], worst)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def draw(ring: Run, single: Run, picture: Path, ring_name: str) -> None:
    steps = range(1, len(ring.losses) + 1)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(steps, single.losses, color="tab:orange", linewidth=6, alpha=0.5, label="one process, torch SDPA")
    axes.plot(steps, ring.losses, color="tab:blue", marker="o", markersize=3, linewidth=1.5, label=ring_name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training, sharded and whole")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def load(path: Path) -> Run:
    return Run(**torch.load(path, weights_only=True))
