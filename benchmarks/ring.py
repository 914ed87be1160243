"""Ring attention on the GPUs of one host, this library beside its peers, in one run.

    torchrun --standalone --nproc-per-node 8 benchmarks/ring.py [--parts compare scaling overlap profile] [--output FOLDER]

Causal, 32 query heads on 8 K/V heads of 128, bfloat16, standard normal inputs, called from torch. The systems take turns; every
sample begins at a barrier; a time is the median of a rank's samples, and that of the slowest rank. TFLOP/s are those of one GPU:
4 B H S S D / 2 over the number of GPUs, forward and backward together 3.5 times that.

compare   forward and forward + backward beside the peers, memory of ours; the largest size by ours alone
scaling   equal tokens a GPU on rings of 1, 2, 4, ... GPUs; all GPUs work, in as many rings as there are
overlap   a pass beside the same pass in which nothing travels (benchmarks/ring_overlap.py)
profile   a picture of one GPU's streams (benchmarks/ring_profile.py)
"""

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before anything imports jax: the card is shared with torch

import torch
import torch.distributed as dist

from report import Report, default_folder, gpus, short
from ring_memory import add_memory, watch_memory
from ring_systems import CONTEXT_PARALLEL, PEERS, RING_FLASH, SYSTEMS, Passes, Shards, make_shards
from ring_team import Clock, Team
from timing import Times, reason, take_turns
from torch_bridge import runtime

HEADS, KV_HEADS, DIM = 32, 8, 128
PHASES = {"forward": 1.0, "both": 3.5}  # of the forward's operations
PARTS = ("compare", "scaling", "overlap", "profile")
SIZES = {16384: 12, 65536: 12, 262144: 5}  # tokens in all, and how many rounds
ALONE_FROM = 2**20  # at this size only ours is measured, and only forward and backward together
SCALING_LENGTH = 32768
SCALING_SAMPLE_MS = 500.0  # longer than any call, so that the card of a small ring is as warm as that of a large one
TARGETS = {  # tokens: peer, phase, ratio
    16384: ((CONTEXT_PARALLEL, "forward", 2.0), (CONTEXT_PARALLEL, "both", 2.2)),
    65536: (
        (CONTEXT_PARALLEL, "forward", 1.4),
        (CONTEXT_PARALLEL, "both", 1.2),
        (RING_FLASH, "forward", 1.6),
        (RING_FLASH, "both", 1.5),
    ),
    262144: (
        (CONTEXT_PARALLEL, "forward", 1.1),
        (CONTEXT_PARALLEL, "both", 1.05),
        (RING_FLASH, "forward", 1.6),
        (RING_FLASH, "both", 1.5),
    ),
}


class Run:
    """The job's state that all parts share."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.team = Team(timeout=options.collective_timeout)
        self.report = Report(options.output if self.team.rank == 0 else None, f"Ring attention on {self.team.size} GPUs")
        self.peer_groups: dict[str, Any] = {}
        # The first rank that stops has all of them stopped, and rank 0 has something to save.
        hard_end = options.hard_end + (0 if self.team.rank == 0 else 20)
        self.clock = Clock(options.budget, hard_end, self.report.finish)

    def name(self, tokens: int) -> str:
        return f"{short(tokens)} tokens"

    def group(self, system: str) -> Any:
        """A peer has a process group of its own, so that a peer which breaks off in the middle breaks nobody else's."""
        if system not in PEERS:
            return dist.group.WORLD
        if system not in self.peer_groups:
            self.peer_groups[system] = dist.new_group()
        return self.peer_groups[system]

    def may_begin(self, what: str) -> bool:
        if self.clock.allows(self.team):
            return True
        self.report.say(f"left out for lack of time: {what}")
        return False


def main() -> None:
    options = arguments()
    run = Run(options)
    runtime.start(device=run.team.device)  # on all ranks at once, whatever part comes first
    run.report.say(f"[{run.clock.elapsed:5.1f} s] started")
    for part in options.parts:
        if not run.may_begin(part):
            continue
        try:
            part_function(part)(run)
        except Exception as error:
            run.report.say(f"{part} failed on rank 0: {reason(error)}")
            print(f"rank {run.team.rank}: {part}: {reason(error)}", file=sys.stderr, flush=True)
        tidy()
        run.report.say(f"[{run.clock.elapsed:5.1f} s] {part} done")
    run.team.ready()
    run.report.finish()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=["auto", CONTEXT_PARALLEL, RING_FLASH])
    parser.add_argument("--sizes", nargs="*", type=int, default=[*SIZES, ALONE_FROM], help="tokens in all, ascending")
    parser.add_argument("--alone-from", type=int, default=ALONE_FROM, help="from this size on only ours is measured")
    parser.add_argument("--scaling-length", type=int, default=SCALING_LENGTH, help="tokens a GPU")
    parser.add_argument("--overlap-lengths", nargs="*", type=int, default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--profile-tokens", type=int, default=65536, help="tokens in all")
    parser.add_argument("--profiler", choices=("torch", "jax"), default="torch")
    parser.add_argument("--platform", default="auto", help="of ours, in scaling, overlap and profile")
    parser.add_argument("--heads", nargs=3, type=int, default=[HEADS, KV_HEADS, DIM], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--rounds", type=int, help="instead of what each size has")
    parser.add_argument("--sample-ms", type=float, default=40.0, help="how long one sample takes")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds after which nothing more is begun")
    parser.add_argument("--hard-end", type=float, default=480.0, help="seconds after which the job stops whatever it does")
    parser.add_argument("--collective-timeout", type=float, default=120.0, help="seconds that a process waits for another")
    parser.add_argument("--output", type=Path, default=default_folder("ring"))
    return parser.parse_args()


def part_function(part: str) -> Any:
    if part == "overlap":
        from ring_overlap import overlap

        return overlap
    if part == "profile":
        from ring_profile import profile

        return profile
    return {"compare": compare, "scaling": scaling}[part]


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def shards_of(run: Run, tokens: int, size: int) -> Shards:
    return make_shards(tokens // size, run.options.heads, run.team.device, run.team.rank)


def tflop(run: Run, tokens: int, size: int, phase: str) -> float:
    heads, _, dim = run.options.heads
    return 4 * heads * dim * tokens**2 / 2 / size * PHASES[phase] / 1e12


def compare(run: Run) -> None:
    """Sizes ascend, and ours comes first: JAX's peak of memory is that of the process so far, so the largest must come last."""
    for tokens in sorted(run.options.sizes):
        case = run.name(tokens)
        if not run.may_begin(case):
            break
        run.report.say(f"\n[{run.clock.elapsed:5.1f} s] {case}")
        alone = tokens >= run.options.alone_from
        names = [name for name in run.options.systems if not alone or name == "auto"]
        compare_size(run, tokens, case, names, ["both"] if alone else list(PHASES))
        tidy()
    for tokens, targets in TARGETS.items():
        for peer, phase, at_least in targets if run.team.size == 8 and tokens in run.options.sizes else ():
            mine, theirs = (run.report.find(run.name(tokens), name, phase) for name in ("auto", peer))
            ratio = theirs / mine if mine and theirs else None
            run.report.ratio(f"{run.name(tokens)}, {phase}: ours / {peer}", ratio, at_least=at_least)


def compare_size(run: Run, tokens: int, case: str, names: list[str], phases: list[str]) -> None:
    shards = shards_of(run, tokens, run.team.size)
    ready: dict[str, Passes] = {}
    truth: list[torch.Tensor] = []
    try:
        for name in names:
            made = prepare(run, case, name, shards, run.group(name), truth, check=len(phases) > 1)
            if made is not None:
                ready[name] = made
        for phase in phases:
            rounds = run.options.rounds or SIZES.get(tokens, 2)
            take_and_add(run, tokens, case, phase, {name: getattr(made, phase) for name, made in ready.items()}, rounds)
    finally:
        for made in ready.values():
            made.opened.close()
    if not run.report.data.get("gpus_during"):
        run.report.note("gpus_during", gpus() if run.team.rank == 0 else [])


def prepare(run: Run, case: str, name: str, shards: Shards, group: Any, truth: list[torch.Tensor], check: bool) -> Passes | None:
    """The system, called once in each way; None, on all ranks, after the reason why not is in the report."""
    made, problem = None, None
    try:
        with watch_memory(run.team.device) as memory:
            made = SYSTEMS[name].prepare(shards, group)
            made.both.call()
        if name == "auto" and case.endswith(" tokens"):
            add_memory(run.report, case, memory, shards)
        error = compare_results(made.results(SYSTEMS[name].heads_first), truth) if check else None
    except Exception as failure:
        problem = reason(failure)
        if made is not None:
            made.opened.close()
    if run.team.agreed(problem is None):
        if check:
            run.report.add(case=case, system=name, phase="check", error=error)
        return made
    run.report.add(case=case, system=name, phase="check", failed=problem or "it failed on another rank")
    return None


def compare_results(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The root mean square of the difference from the first system's results, over that of these: the largest of the four."""
    if not truth:
        truth.extend(found)
    return max(distance(*pair) for pair in zip(found, truth, strict=True))


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    heads = min(found.shape[2], truth.shape[2])
    # Where K/V heads were repeated, the gradient is the sum over the copies.
    found, truth = (x.float().unflatten(2, (heads, -1)).sum(3) for x in (found, truth))
    return float((found - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def take_and_add(run: Run, tokens: int, case: str, phase: str, timed: dict, rounds: int, size: int | None = None) -> None:
    times, failed = take_turns(timed, rounds, run.options.sample_ms, run.team)
    for name, taken in times.items():
        add_times(run, case, name, phase, taken, tflop(run, tokens, size or run.team.size, phase))
    for name, error in failed.items():
        run.report.add(case=case, system=name, phase=phase, failed=reason(error))


def add_times(run: Run, case: str, name: str, phase: str, taken: Times, work: float) -> None:
    median = run.team.slowest(taken.median)
    run.report.add(case=case, system=name, phase=phase, **taken.figures() | {"ms": median}, tflops=work / median * 1000)


def scaling(run: Run) -> None:
    """Rings of 1, 2, 4, ... side by side on all GPUs, so that heat and the slowest card are the same for every size."""
    sizes = [2**power for power in range(run.team.size.bit_length()) if run.team.size % 2**power == 0]
    length = run.options.scaling_length
    shards = shards_of(run, length, 1)
    ready: dict[int, Passes] = {}
    for size in sizes:
        made = prepare(run, scaling_name(length, size), run.options.platform, shards, own_group(run, size), [], check=False)
        if made is not None:
            ready[size] = made
    for phase in PHASES:
        timed = {str(size): getattr(made, phase) for size, made in ready.items()}
        times, _ = take_turns(timed, run.options.rounds or 6, max(run.options.sample_ms, SCALING_SAMPLE_MS), run.team)
        rates = {}
        for size in [size for size in ready if str(size) in times]:
            case, work = scaling_name(length, size), tflop(run, length * size, size, phase)
            add_times(run, case, run.options.platform, phase, times[str(size)], work)
            rates[size] = run.report.find(case, run.options.platform, phase, "tflops")
        alone, together = rates.get(1), rates.get(sizes[-1])
        efficiency = together / alone if alone and together else None
        run.report.ratio(f"scaling, {phase}: rate of a GPU in a ring of {sizes[-1]} / alone", efficiency, at_least=0.9)


def scaling_name(length: int, size: int) -> str:
    return f"{short(length)} tokens a GPU, ring of {size}"


def own_group(run: Run, size: int) -> Any:
    """This rank's group, of several disjoint ones; every rank makes all of them."""
    if size == run.team.size:
        return dist.group.WORLD
    if size == 1:
        return "local"
    groups = [dist.new_group(range(first, first + size)) for first in range(0, run.team.size, size)]
    return groups[run.team.rank // size]


if __name__ == "__main__":
    main()
