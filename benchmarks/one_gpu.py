"""Attention on one GPU: this library compared with its peers, forward and backward, in one run.

    python benchmarks/one_gpu.py [--cases d128-causal ...] [--systems triton FlexAttention ...] [--output FOLDER]

bfloat16, standard normal inputs, median of several rounds in which the systems take turns. TFLOP/s count 4 B H S S D (half if
causal), the backward 2.5 times that; the backward is timed separately. Systems named "in JAX", jax.nn's and ejkernel are timed by
the wall clock over back-to-back calls without torch, all others by CUDA events from torch. `error` is the root mean square of the
difference from the first system that ran, over that of its results: the largest of output and gradients.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from one_gpu_systems import SYSTEMS
from report import Report, default_folder, gpus
from systems import Case, Inputs, Prepared, difference, make_inputs
from team import ON_GPU, Team
from timing import Timed, Times, reason, sample, take_turns

LONG = 65536
CASES = {
    case.name: case
    for case in (
        Case("d128-causal", 16384),
        Case("d128-full", 16384, causal=False),
        Case("d64-causal", 16384, heads=32, kv_heads=32, dim=64),
        Case("d64-full", 16384, heads=32, kv_heads=32, dim=64, causal=False),
        Case("gqa-causal", 16384, kv_heads=4),
        Case("short-causal", 2048),  # where the host's time shows; the only one small enough for the xla kernel
    )
}
# Work proportional to the visible pairs: the time relative to that of the whole sequence, whose cost per pair is the unit.
WHOLE = Case("64k whole", LONG)
UNEVEN = (1500, 8190, 3001, 977, 6143, 2222, 10007, 4097, 128, 5000, 7411, 3333, 1025, 6007, 2049, 4446)
PARTS = (
    Case("64k window 4096", LONG, window=4096),
    Case("64k 16 documents of 4096", LONG, documents=(4096,) * 16),
    Case("64k 16 uneven documents", LONG, documents=UNEVEN),
)
PARTS_LIMIT = 1.3
# Systems that are too slow, or take too long to compile, to run in every case.
ONLY_IN = {
    "xla": ("short-causal",),
    "ejkernel Triton": ("d128-causal", "d128-full"),
    "FlexAttention": ("d128-causal", "d128-full", "d64-causal", "d64-full", "gqa-causal"),
}
OURS = ("triton", "cuda", "auto")
PHASES = ("forward", "backward")
TARGETS = (  # how many times as fast as the peer, at dims 128 and 64
    ("triton", "FlexAttention", "forward", 1.25),
    ("triton", "FlashAttention-2 (SDPA)", "forward", 1.5),
    ("triton", "FlexAttention", "backward", 1.0),
)
RATES = {"forward": 510, "backward": 400}  # of triton at dim 128, TFLOP/s


def main() -> None:
    options, team = arguments(), Team()
    report = Report(options.output, "Attention on one GPU")
    start = time.monotonic()

    def may_begin(what: str) -> bool:
        elapsed = time.monotonic() - start
        report.say(f"\n[{elapsed:5.1f} s] {what}{'' if elapsed < options.budget else ': left out for lack of time'}")
        return elapsed < options.budget

    for name in options.cases:
        if may_begin(name):
            measure_case(team, report, shortened(CASES[name], options.scale), options)
    for system in [name for name in options.systems if name in options.parts]:
        if may_begin(f"{system}: work in proportion to what is visible"):
            measure_parts(team, report, system, options)
    targets(report, options.cases)
    report.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--parts", nargs="*", choices=OURS, default=["triton", "auto"], help="of which the 64k tokens are measured")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sample-ms", type=float, default=15.0, help="how long one sample takes")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which nothing more is begun")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this, to try the program out")
    parser.add_argument("--device", default="cuda" if ON_GPU else "cpu")
    parser.add_argument("--output", type=Path, default=default_folder("one-gpu"))
    return parser.parse_args()


def measure_case(team: Team, report: Report, case: Case, options: argparse.Namespace) -> None:
    inputs = make_inputs(case, options.device)
    ready: dict[str, Prepared] = {}
    truth: list[torch.Tensor] | None = None
    for name in options.systems:
        prepared = prepare(report, name, case, inputs) if case.name in ONLY_IN.get(name, CASES) else None
        if prepared is not None:
            found = prepared.results("backward")
            truth = truth or found
            report.add(case=case.name, system=name, phase="check", error=difference(found, truth), **repeatable(name, prepared))
            ready[name] = prepared
    for phase in PHASES:
        timed = {name: prepared.passes[phase] for name, prepared in ready.items()}
        times, failed = take_turns(team, timed, options.rounds, options.sample_ms)
        for name, taken in times.items():
            add_times(report, case, name, phase, taken)
        for name, error in failed.items():
            report.add(case=case.name, system=name, phase=phase, failed=reason(error))
    if ready and not report.data.get("gpus_during"):
        report.note("gpus_during", gpus_at_work(next(iter(ready.values())).passes["forward"]))


def gpus_at_work(timed: Timed) -> list[dict[str, str]]:
    """The clocks while the GPU is busy with about a second of queued calls."""
    once = max(sample(timed, 1), 0.1)
    for _ in range(min(500, int(1500 / once)) if ON_GPU else 0):
        timed.call()
    return gpus()


def shortened(case: Case, by: int) -> Case:
    if by == 1:
        return case
    documents = tuple(max(1, length // by) for length in case.documents)
    window = case.window and max(1, case.window // by)
    return replace(case, length=sum(documents) or case.length // by, window=window, documents=documents)


def prepare(report: Report, name: str, case: Case, inputs: Inputs) -> Prepared | None:
    """The system, called once in both directions; None, with the reason added to the report, if that fails."""
    try:
        prepared = SYSTEMS[name](case, inputs)
        prepared.results("backward")
        return prepared
    except Exception as error:  # a system that cannot do this, or is not installed, must not stop the others
        report.add(case=case.name, system=name, phase="check", failed=reason(error))
        return None


def repeatable(name: str, prepared: Prepared) -> dict[str, str]:
    """Our kernel promises bit-identical results in every run."""
    if name not in OURS:
        return {}
    once, again = prepared.results("backward"), prepared.results("backward")
    return {"equal bits": "yes" if all(torch.equal(a, b) for a, b in zip(once, again, strict=True)) else "NO"}


def add_times(report: Report, case: Case, system: str, phase: str, taken: Times) -> None:
    tflops = case.tflop(phase) / taken.median * 1000
    report.add(case=case.name, system=system, phase=phase, tflops=tflops, **taken.figures())


def measure_parts(team: Team, report: Report, system: str, options: argparse.Namespace) -> None:
    """Window and packed documents compared with the whole sequence, by the same system, in turns."""
    ready: dict[Case, Prepared] = {}
    for case in (shortened(case, options.scale) for case in (WHOLE, *PARTS)):
        prepared = prepare(report, system, case, make_inputs(case, options.device))
        if prepared is not None:
            ready[case] = prepared
    whole = next((case for case in ready if case.name == WHOLE.name), None)
    for phase in PHASES:
        timed = {case.name: prepared.passes[phase] for case, prepared in ready.items()}
        times, _ = take_turns(team, timed, max(3, options.rounds // 2), options.sample_ms)
        for case in [case for case in ready if case.name in times]:
            add_times(report, case, system, phase, times[case.name])
            if whole is not None and case is not whole:
                over = times[case.name].median / times[whole.name].median / (case.pairs / whole.pairs)
                report.ratio(f"{system}, {case.name}, {phase}: time over its share of the whole", over, at_most=PARTS_LIMIT)


def targets(report: Report, cases: list[str]) -> None:
    for case in cases:
        for system, peer, phase, at_least in TARGETS if case.startswith(("d128", "d64")) else ():
            report.speedup(case, system, peer, phase, at_least)
        for phase, at_least in RATES.items() if case.startswith("d128") else ():
            report.ratio(f"{case} {phase}: triton, TFLOP/s", report.find(case, "triton", phase, "tflops"), at_least=at_least)
        for phase in PHASES if case != "short-causal" else ():
            report.speedup(case, "cuda", "cuDNN (SDPA)", phase, 0.97)


if __name__ == "__main__":
    main()
