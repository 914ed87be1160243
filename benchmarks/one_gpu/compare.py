"""Attention on one GPU: this library compared with its peers, in one run.

    python -m benchmarks.one_gpu.compare [--parts dense packed sinks softcap] [--cases d128-causal ...] [--systems cute ...]

dense     16384 tokens, causal and full, forward and backward
packed    65536 tokens: the whole, a window, documents; forward, and forward and backward together
sinks     16384 tokens with a sink for each head, causal and with a window, the same
softcap   16384 tokens with a soft cap, the same

bfloat16, standard normal inputs, median of several rounds in which the systems take turns. TFLOP/s count 4 B H S S D (half if
causal, the visible pairs if packed), the backward 2.5 times that. Systems are called from torch, or without torch where their name
says so; all are timed by CUDA events. `error` is the root mean square of the difference from the first system that ran, over that
of its results: the largest of output and gradients.
"""

import argparse
from functools import partial

from benchmarks.harness.systems import Case
from benchmarks.one_gpu.bench import Bench, arguments
from benchmarks.one_gpu.systems import SYSTEMS

LONG = 65536
UNEVEN = (1500, 8190, 3001, 977, 6143, 2222, 10007, 4097, 128, 5000, 7411, 3333, 1025, 6007, 2049, 4446)
CASES = {
    "dense": (
        Case("d128-causal", 16384),
        Case("d128-full", 16384, causal=False),
        Case("d64-causal", 16384, heads=32, kv_heads=32, dim=64),
        Case("d64-full", 16384, heads=32, kv_heads=32, dim=64, causal=False),
        Case("gqa-causal", 16384, kv_heads=4),
    ),
    "packed": (
        Case("64k whole", LONG),
        Case("64k window 4096", LONG, window=4096),
        Case("64k 16 uneven documents", LONG, documents=UNEVEN),
        Case("64k 16 documents of 4096", LONG, documents=(4096,) * 16),
        Case("64k shared heads, documents", LONG, kv_heads=4, documents=UNEVEN),
    ),
    "sinks": (Case("sinks-causal", 16384, sinks=True), Case("sinks-window", 16384, window=1024, sinks=True)),
    "softcap": (Case("softcap-causal", 16384, softcap=30.0), Case("softcap-full", 16384, causal=False, softcap=30.0)),
}
DENSE = ("flash-attn-4", "cuDNN (SDPA)", "cute", "cute, in JAX", "cuda", "cuda, in JAX", "triton", "triton, in JAX")
SPARSE = ("triton", "cute", "cute, segment ids", "flash-attn-4", "FlexAttention")
USUAL = {"dense": DENSE, "packed": (*SPARSE, "varlen_attn"), "sinks": SPARSE, "softcap": SPARSE}
BOTH = ("forward", "both")
PHASES = {"dense": ("forward", "backward"), "packed": BOTH, "sinks": BOTH, "softcap": BOTH}
PROPORTION_LIMIT = 1.3  # of a sparse call's time over that of its share of the whole


def main() -> None:
    options = read_arguments()
    bench = Bench(options, "Attention on one GPU")
    chosen = [(part, case) for part in options.parts for case in CASES[part] if not options.cases or case.name in options.cases]
    bench.run([(case.name, partial(measure, bench, part, case)) for part, case in chosen], partial(targets, bench))


def read_arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "one-gpu")
    names = [case.name for cases in CASES.values() for case in cases]
    parser.add_argument("--parts", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--cases", nargs="*", choices=names, metavar="CASE", help=f"of these parts: {', '.join(names)}")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    return parser.parse_args()


def measure(bench: Bench, part: str, case: Case) -> None:
    bench.measure(case, bench.options.systems or USUAL[part], PHASES[part])


def targets(bench: Bench) -> None:
    """Those whose case was measured."""
    report = bench.report
    seen = {row["case"] for row in report.rows}
    for case in [case for case in CASES["dense"] if case.name in seen]:
        for phase in PHASES["dense"]:
            report.speedup(case.name, "cute", "flash-attn-4", phase, at_least=0.97)
            report.speedup(case.name, "cute, in JAX", "flash-attn-4", phase, at_least=0.97)
            report.speedup(case.name, "cuda", "cuDNN (SDPA)", phase, at_least=0.97)
    whole, *sparse = CASES["packed"]
    for case in [case for case in sparse if case.name in seen]:
        for phase in PHASES["packed"]:
            report.speedup(case.name, "cute", "triton", phase, at_least=1.3)
            for system in ("cute", "triton") if whole.name in seen else ():
                proportion(bench, system, case, whole, phase)


def proportion(bench: Bench, system: str, case: Case, whole: Case, phase: str) -> None:
    """Of the rates, since both count visible pairs: what a visible pair costs more than in the whole."""
    here, there = (bench.report.find(x.name, system, phase, "tflops") for x in (case, whole))
    name = f"{system}, {case.name}, {phase}: time over its share of the whole"
    bench.report.ratio(name, there / here if here and there else None, at_most=PROPORTION_LIMIT)


if __name__ == "__main__":
    main()
