"""The peak of GPU memory of forward and backward, each system in a job of its own, on rings of several sizes.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.ring.memory SYSTEM --tokens 16384    # one such job, by hand

A job is torchrun with this file, which calls one system and prints one JSON line. The jobs of all systems run side by side: what is
counted is a process's own. It is the peak of torch's allocator plus the peak of JAX's: the bytes that were asked for, without what
an allocator keeps for later, which depends on what ran before. The two peaks fall together, in the backward: torch then holds all
results, and JAX all temporaries. A GPU's own count (nvidia-smi) would add contexts, NCCL's buffers and what allocators keep, which
are the same for all systems or an accident. "forward" is the peak of a forward alone, with the output's gradient there already.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import jobs
from benchmarks.harness.report import short
from benchmarks.harness.systems import Case, make_inputs
from benchmarks.harness.team import ON_GPU, Team, tidy
from benchmarks.harness.timing import reason
from benchmarks.ring.run import Run
from benchmarks.ring.systems import SYSTEMS

SAID = '{"peak": '


class Job(NamedTuple):
    system: str
    process: "subprocess.Popen[str]"
    said: IO[str]


def memory(run: Run) -> None:
    """The part of benchmarks/ring/compare.py: rank 0 starts the jobs of one size together, and the other ranks wait for it."""
    options = run.options
    sizes = sorted(size for size in options.memory_sizes if size <= run.team.size)
    names = {size: f"memory, {short(options.memory_tokens)} tokens a GPU, ring of {size}" for size in sizes}
    for size, name in names.items():
        if not run.may_begin(name):
            continue
        if run.team.rank == 0:
            tell(run, name, [start(options, system, size) for system in options.systems])
        run.team.ready()
    for system in options.systems if len(names) > 1 else ():
        *_, smaller, largest = (run.report.find(name, system, "peak", "KiB a token") for name in names.values())
        growth = largest / smaller if largest and smaller else None
        run.report.ratio(f"memory a token, {system}: the largest ring / the one before", growth, at_most=1.02)


def start(options: argparse.Namespace, system: str, size: int) -> Job:
    settings = ["--tokens", str(options.memory_tokens), "--heads", *map(str, options.heads)]
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe would fill up while nobody reads)
    return Job(system, jobs.begin(size, "benchmarks.ring.memory", system, *settings, out=said), said)


def tell(run: Run, case: str, begun: list[Job]) -> None:
    """Adds what the jobs found to the report. All have the same time, and are ended when it is over."""
    end = time.monotonic() + run.options.memory_timeout
    for job in begun:
        try:
            job.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(job.process.pid, signal.SIGTERM)  # with what torchrun started: the job is a session of its own
            with suppress(subprocess.TimeoutExpired):  # torchrun gives its processes 30 s; the other jobs are told in any case
                job.process.wait(45)
        with job.said as said:
            said.seek(0)
            run.report.add(case=case, system=job.system, phase="peak", **figures_in(said.read().splitlines()))


def figures_in(said: list[str]) -> dict[str, Any]:
    """What a job printed, or why it printed nothing: its first error."""
    for line in said:
        if line.startswith(SAID):
            return json.loads(line)["peak"]
    return {"failed": jobs.first_error(said, "it printed nothing in the time it had")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--tokens", type=int, default=16384, help="of a shard")
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    options = parser.parse_args()
    team = Team()
    try:
        found = peaks_of_a_call(team, options.system, Case("", options.tokens, *options.heads))
    except Exception as error:
        found = {"failed": reason(error)}
    team.say(json.dumps({"peak": found}))
    sys.exit("failed" in found)


def peaks_of_a_call(team: Team, system: str, case: Case) -> dict[str, Any]:
    """KiB a token of the shard, those of the rank that needs most."""
    group = dist.group.WORLD
    assert group is not None
    shards = make_inputs(case, team.device, seed=team.rank)
    found = {"held": 2 * shards.nbytes + 4 * case.length * case.heads}  # q, k, v, out, dout, dq, dk, dv, the LSE
    prepared = SYSTEMS[system](shards, group)
    del shards  # where a system has its own layout or more heads, what it holds are copies
    for phase in ("forward", "both"):
        found |= {f"{phase}, {name}": nbytes for name, nbytes in peaks(prepared.passes[phase].call).items()}
    prepared.opened.close()
    if ON_GPU:
        found["KiB a token"] = found["both, torch"] + found["both, JAX"]
    return {name: team.slowest(nbytes / case.length / 1024) for name, nbytes in found.items()}


def peaks(call: Callable[[], Any]) -> dict[str, int]:
    """Bytes, by allocator; none without a GPU. The first call compiles, and the second is counted by torch. JAX counts all calls of
    the process, so what needs less must come first."""
    call()
    tidy()
    if not ON_GPU:
        return {}
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    of_jax = 0
    if "jax" in sys.modules:
        import jax

        of_jax = (jax.local_devices()[0].memory_stats() or {})["peak_bytes_in_use"]
    return {"torch": torch.cuda.max_memory_allocated(), "JAX": of_jax}


if __name__ == "__main__":
    main()
