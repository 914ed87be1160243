"""Ring attention on the GPUs of one host: this library compared with its peers, in one run.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.ring.compare [--parts compare memory ...] [--output FOLDER]

Causal, 32 query heads on 8 K/V heads of 128, bfloat16, standard normal inputs, called from torch. The systems take turns; every
sample begins at a barrier; a time is the median of a rank's samples, for the slowest rank. TFLOP/s are per GPU:
4 B H S S D / 2 divided by the number of GPUs, forward and backward together 3.5 times that.

compare   forward and forward + backward, compared with the peers; the largest size with our ring only
memory    the peak of every system, each in a process of its own, on rings of several sizes (benchmarks/ring/memory.py)
window    a sliding window, with every strategy; from auto, ring and the named systems
scaling   the same number of tokens per GPU on rings of 1, 2, 4, ... GPUs; several rings at once, so that all GPUs work
overlap   a pass compared with the same pass without any transfer (benchmarks/ring/overlap.py)
profile   where a step's time goes, and a plot of one GPU's streams (benchmarks/ring/profile.py)
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness.report import default_folder, short
from benchmarks.harness.systems import Prepared
from benchmarks.harness.team import tidy
from benchmarks.harness.timing import reason
from benchmarks.ring.memory import memory
from benchmarks.ring.overlap import overlap
from benchmarks.ring.profile import profile
from benchmarks.ring.run import Run
from benchmarks.ring.systems import CONTEXT_PARALLEL, PEERS, RING_FLASH, STRATEGIES, SYSTEMS
from torch_bridge.start import runtime

PHASES = ("forward", "both")
SIZES = (16384, 65536, 262144)  # tokens in all
ALONE_FROM = 2**20  # from this size on only our ring is measured, and only forward and backward together
SCALING_SAMPLE_MS = 500.0  # longer than any call, so that the GPUs of small and large rings are equally warm
TARGETS = {  # by number of GPUs: tokens, peer, how many times as fast forward and in both
    4: (
        (16384, CONTEXT_PARALLEL, 2.0, 1.9),
        (65536, CONTEXT_PARALLEL, 1.4, 1.3),
        (262144, CONTEXT_PARALLEL, 1.15, 1.17),
    ),
    8: (
        (16384, CONTEXT_PARALLEL, 3.0, 3.0),
        (65536, CONTEXT_PARALLEL, 1.6, 1.4),
        (65536, RING_FLASH, 1.6, 1.5),
        (262144, CONTEXT_PARALLEL, 1.25, 1.2),
        (262144, RING_FLASH, 1.6, 1.5),
    ),
}
RATES = {  # by number of H200s: tokens, TFLOP/s a GPU of each phase
    4: ((16384, {"forward": 480, "both": 440}), (65536, {"forward": 680, "both": 610}), (262144, {"forward": 660, "both": 610})),
    8: (
        (16384, {"forward": 260, "both": 260}),
        (65536, {"forward": 560, "both": 500}),
        (262144, {"forward": 640, "both": 590}),
        (ALONE_FROM, {"both": 600}),
    ),
}


def compare(run: Run) -> None:
    for tokens in sorted(run.options.sizes):
        if run.may_begin(f"{short(tokens)} tokens"):
            compare_size(run, tokens, alone=tokens >= run.options.alone_from)
            tidy()
    for tokens, peer, *at_least in TARGETS.get(run.team.size, ()):
        for phase, target in zip(PHASES, at_least, strict=True) if tokens in run.options.sizes else ():
            run.report.speedup(f"{short(tokens)} tokens", "auto", peer, phase, target)
    for tokens, rates in RATES.get(run.team.size, ()):
        for phase, target in rates.items() if tokens in run.options.sizes else ():
            name = f"{short(tokens)} tokens"
            run.report.ratio(
                f"{name} {phase}: auto, TFLOP/s a GPU", run.report.find(name, "auto", phase, "tflops"), at_least=target
            )


def compare_size(run: Run, tokens: int, alone: bool) -> None:
    case, shards = run.case(f"{short(tokens)} tokens", tokens), run.shards(tokens // run.team.size)
    ready: dict[str, Prepared] = {}
    truth: list[torch.Tensor] | None = None if alone else []
    try:
        for name in run.options.alone_systems if alone else run.options.systems:
            made = run.prepare(case, name, shards, run.group(name), truth)
            if made is not None:
                ready[name] = made
        for phase in ("both",) if alone else PHASES:
            times, failed = run.take_turns({name: made.passes[phase] for name, made in ready.items()}, rounds_of(tokens))
            for name, taken in times.items():
                run.add_times(case, name, phase, taken, run.team.size)
            for name, error in failed.items():
                run.report.add(case=case.name, system=name, phase=phase, failed=reason(error))
    finally:
        for made in ready.values():
            made.opened.close()
    if not run.report.data.get("gpus_during"):
        run.report.note("gpus_during", run.report.gpus())


def rounds_of(tokens: int) -> int:
    return 12 if tokens <= 65536 else 5 if tokens < ALONE_FROM else 2


def window(run: Run) -> None:
    """Every strategy, and the ring in both layouts; TFLOP/s of what the window shows."""
    options = run.options
    for tokens in options.window_tokens:
        case = run.case(f"{short(tokens)} tokens, window of {options.window}", tokens, options.window)
        shards = run.shards(tokens // run.team.size)
        ready: dict[str, Prepared] = {}
        for layout in ("zigzag", "contiguous"):
            truth: list[torch.Tensor] = []
            for name in options.window_systems:
                more = {"sliding_window": (options.window - 1, 0), "layout": layout}
                made = run.prepare(case, name, shards, run.group(name), truth, **more)
                if made is not None:
                    ready[f"{name}, {layout}"] = made
        for phase in PHASES:
            times, _ = run.take_turns({name: made.passes[phase] for name, made in ready.items()}, 8)
            for name, taken in times.items():
                run.add_times(case, name, phase, taken, run.team.size)


def scaling(run: Run) -> None:
    """Rings of 1, 2, 4, ... side by side on all GPUs, so that heat and the slowest GPU are the same for every size."""
    length, platform = run.options.scaling_length, run.options.platform
    sizes = [2**power for power in range(run.team.size.bit_length()) if run.team.size % 2**power == 0]
    shards = run.shards(length)
    cases = {size: run.case(f"{short(length)} tokens a GPU, ring of {size}", length * size) for size in sizes}
    prepared = {size: run.prepare(cases[size], platform, shards, run.team.group(size)) for size in sizes}
    for phase in PHASES:
        timed = {str(size): made.passes[phase] for size, made in prepared.items() if made is not None}
        times, _ = run.take_turns(timed, rounds=6, sample_ms=SCALING_SAMPLE_MS)
        for size in [size for size in sizes if str(size) in times]:
            run.add_times(cases[size], platform, phase, times[str(size)], size)
        alone, together = (run.report.find(cases[size].name, platform, phase, "tflops") for size in (1, sizes[-1]))
        efficiency = together / alone if alone and together else None
        run.report.ratio(f"scaling, {phase}: rate of a GPU in a ring of {sizes[-1]} / alone", efficiency, at_least=0.95)


PARTS = {"compare": compare, "window": window, "memory": memory, "scaling": scaling, "overlap": overlap, "profile": profile}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=["auto", *STRATEGIES, "ring cuda", "ring triton", *PEERS])
    parser.add_argument("--sizes", nargs="*", type=int, default=[*SIZES, ALONE_FROM], help="tokens in all")
    parser.add_argument("--alone-from", type=int, default=ALONE_FROM, help="from this size on only the next, and only both")
    parser.add_argument("--alone-systems", nargs="*", choices=SYSTEMS, default=["auto"])
    parser.add_argument("--memory-tokens", type=int, default=16384, help="a GPU")
    parser.add_argument("--memory-sizes", nargs="*", type=int, default=[2, 4, 8], help="of the rings whose memory is measured")
    parser.add_argument("--memory-timeout", type=float, default=240.0, help="seconds for the jobs of one size")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--window-tokens", nargs="*", type=int, default=[65536], help="in all")
    parser.add_argument("--window-systems", nargs="*", choices=SYSTEMS, default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--scaling-length", type=int, default=32768, help="tokens a GPU")
    parser.add_argument("--overlap-lengths", nargs="*", type=int, default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--profile-tokens", type=int, default=65536, help="tokens in all")
    parser.add_argument("--profile-systems", nargs="*", choices=SYSTEMS, default=["auto", "cute", "cuda", "triton"])
    parser.add_argument("--platform", default="auto", help="of ours, in scaling and overlap")
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--rounds", type=int, help="instead of what each size has")
    parser.add_argument("--sample-ms", type=float, default=40.0, help="how long one sample takes")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds after which nothing more is begun")
    parser.add_argument("--hard-end", type=float, default=1200.0, help="seconds after which the job stops whatever it does")
    parser.add_argument("--collective-timeout", type=float, default=120.0, help="seconds that a process waits for another")
    parser.add_argument("--output", type=Path, default=default_folder("ring"))
    return parser.parse_args()


def main() -> None:
    run = Run(arguments())
    runtime.start(device=run.team.device)  # on all ranks at once, whichever part comes first
    for part in run.options.parts:
        if not run.may_begin(part):
            continue
        try:
            PARTS[part](run)
        except Exception as error:
            print(f"rank {run.team.rank}: {part} failed: {reason(error)}", file=sys.stderr, flush=True)
        tidy()
    run.team.ready()
    run.report.note("seconds", round(time.monotonic() - run.start, 1))
    run.report.finish()
    run.team.close()


if __name__ == "__main__":
    main()
