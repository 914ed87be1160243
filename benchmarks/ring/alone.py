"""One rank of a ring, alone on one GPU: what its kernels and joining take in a ring larger than the machine.

    CUDA_VISIBLE_DEVICES=0 python -m benchmarks.ring.alone [--size 8] [--rank 3] [--sizes 16384 ...] [--platforms auto cute ...]

XLA is told of SIZE hosts with a GPU each, of which this one is RANK, and nothing is sent: each step computes on the K/V that the
rank already has, as in benchmarks/ring/overlap.py. The program is that of the ring but for its transfers, so its rate is about what
the ring reaches if they are hidden. In JAX alone, by the wall clock, without the host's work of a call from torch. "both" is the
sum of forward and backward. To hold it against rings that exist: --size 2, or 4.

Without a GPU all ranks compute, in small, to try the program out.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.harness.report import default_folder, short
from benchmarks.harness.systems import Case
from benchmarks.harness.team import ON_GPU
from benchmarks.harness.timing import reason, take_turns
from benchmarks.one_gpu.bench import Bench
from benchmarks.ring.overlap import STILL, compiled_passes

SAMPLE_MS = 40.0  # that of benchmarks/ring/compare.py


def mesh_of(size: int, rank: int) -> Mesh:
    """A mesh of ``size`` GPUs in the place of ``rank`` of which is this process's only one."""
    if ON_GPU:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"  # nobody to share it with
        jax.config.update("jax_mock_gpu_topology", f"1x{size}x1")
        jax.config.update("jax_pjrt_client_create_options", {"node_id": rank})
    else:
        jax.config.update("jax_num_cpu_devices", size)
    return Mesh(np.array(jax.devices()), (STILL,))


def measure(bench: Bench, mesh: Mesh, case: Case) -> None:
    ready, report, size = {}, bench.report, bench.options.size
    for platform in bench.options.platforms:
        try:
            ready[platform] = compiled_passes(mesh, case, platform)
        except Exception as refusal:
            report.add(case=case.name, system=platform, phase="check", failed=reason(refusal))
    total: dict[str, list[float]] = {name: [] for name in ready}
    for phase in ("forward", "backward"):
        times, failed = take_turns(
            bench.team, {name: passes[phase] for name, passes in ready.items()}, bench.options.rounds, SAMPLE_MS
        )
        for name, taken in times.items():
            total[name].append(taken.median)
            rate = case.tflop(phase) / size / taken.median * 1000
            report.add(case=case.name, system=name, phase=phase, tflops=rate, **taken.figures())
        for name, error in failed.items():
            report.add(case=case.name, system=name, phase=phase, failed=reason(error))
    for name, ms in ((name, sum(found)) for name, found in total.items() if len(found) == 2):
        report.add(case=case.name, system=name, phase="both", ms=ms, tflops=case.tflop("both") / size / ms * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8, help="ranks of the ring")
    parser.add_argument("--rank", type=int, help="which of them this is; 3 if there are as many")
    parser.add_argument("--sizes", nargs="*", type=int, default=[2**14, 2**16, 2**18, 2**20], help="tokens in all")
    parser.add_argument("--platforms", nargs="*", default=["cute", "cuda", "triton"])
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which nothing more is begun")
    parser.add_argument("--output", type=Path, default=default_folder("ring-alone"))
    options = parser.parse_args()
    if options.rank is None:
        options.rank = min(3, options.size - 1)
    if not 0 <= options.rank < options.size:
        parser.error(f"--rank must be one of the {options.size} ranks, 0 to {options.size - 1}; got {options.rank}")
    bench = Bench(options, f"Rank {options.rank} of a ring of {options.size}, alone on one GPU, nothing sent")
    mesh = mesh_of(options.size, options.rank)
    cases = [Case(f"{short(tokens)} tokens, a rank of {options.size}", tokens, *options.heads) for tokens in options.sizes]
    bench.run(((case.name, partial(measure, bench, mesh, case)) for case in cases), conclude=lambda: None)


if __name__ == "__main__":
    main()
